"""The model runner of one rank: executes steps, one after another, on one device.

Knows the model, the KV pool, the page table and each slot's last token; nothing of requests, queues or pages' owners,
which are the scheduler's. Whatever changes on the device changes in the order of the steps, on one stream.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from minisgl.attention import AttentionBackend, AttnBatch
from minisgl.config import Config
from minisgl.core import EngineDeadError, EngineSpec, Step, StepResult
from minisgl.engine import setup
from minisgl.engine.graph import StaticInputs
from minisgl.engine.inputs import InputBuilder, ModelInputs, PiecewiseInputBuffers, SamplingInputs
from minisgl.engine.kv_sizing import size_pool
from minisgl.engine.piecewise import PiecewiseAttention
from minisgl.engine.sampler import Sampled, SamplePlan, Sampler, read_logprobs
from minisgl.engine.transfer import Download
from minisgl.kvcache.pool import KVPool
from minisgl.layers.context import Context

if TYPE_CHECKING:
    from minisgl.plugin_manager.manager import PluginManager


@dataclass(slots=True)
class _Launched:
    """A step whose result nobody has read yet."""

    step: Step
    plan: SamplePlan | None
    download: Download


class TorchEngine:
    """One rank's engine (`minisgl.core.Engine`).

    ``address`` is ``host:port`` of rank 0's rendezvous where ``size`` is above 1. Raises `ConfigError` where the
    options do not fit the model, the attention backend or the machine.
    """

    def __init__(self, config: Config, manager: PluginManager, *, rank: int = 0, size: int = 1, address: str = ""):
        self.rank, self.size = rank, size
        self.device = setup.pick_device(config, rank)
        path, model_config = setup.read_model(config)
        self.dtype = setup.pick_dtype(config, model_config, self.device)
        max_len = setup.pick_max_len(config, model_config)
        self.eos_ids = setup.eos_ids(path)
        self._unread: deque[_Launched] = deque()
        self._closed = False

        self.attention: AttentionBackend = setup.build_attention(config, manager, self.device, self.dtype)
        self.comm = manager.build(
            "communicator", config.communicator, rank=rank, size=size, address=address, device=self.device
        )
        moe = manager.build("moe", config.moe, device=self.device) if model_config.num_experts else None
        self.graph = manager.build("graph", config.graph, device=self.device)
        piecewise = getattr(self.graph, "piecewise", lambda most: ())(setup.largest_step(config, max_len))
        self._piecewise = PiecewiseAttention(self.attention) if piecewise else None
        self.ctx = Context(self.comm, self._piecewise or self.attention, moe, self.device, self.dtype)
        self.model = setup.build_model(config, manager, path, model_config, self.ctx)

        layers = self.model.attention_layers()
        needs = self.attention.needs()
        shape = (len(layers), config.page_size, layers[0].kv_heads, layers[0].head_dim)
        pages = size_pool(config, KVPool.page_bytes(*shape, self.dtype), max_len, self.device, needs.workspace)
        pages = min(int(n) for n in self.comm.exchange(str(pages).encode()))
        self.spec = EngineSpec(
            page_size=config.page_size,
            num_pages=pages,
            max_running_requests=config.max_running_requests,
            max_seq_len=max_len,
            vocab_size=model_config.vocab_size,
        )
        self.ctx.pool = KVPool(shape[0], pages + 1, *shape[1:], self.dtype, self.device, needs.layout)
        self.sampler = Sampler(self.spec.max_running_requests, self.spec.vocab_size, self.device)
        self._inputs = InputBuilder(self.spec, self.device, sharing=needs.shared_prefix)
        self._last = torch.zeros(self.spec.max_running_requests + 1, dtype=torch.int64, device=self.device)
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        keys = self.graph.buckets(self.spec.max_running_requests) if needs.graph else ()
        if needs.shared_prefix:  # few buckets of that kind: a row of padding costs less than a recording
            keys = [*keys, *(key._replace(shared=True) for key in keys if key.rows % 32 == 0)]
        self._frames: dict[Any, StaticInputs] = {}
        self._token_frames: dict[Any, PiecewiseInputBuffers] = {}
        if self._stream is not None:  # weights, pool and tables came on the default stream
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with self._computing(), setup.room_to_record(config):
            # A backend may launch kernels: as in a step, on this rank's device and stream.
            self.attention.bind(self.ctx.pool, layers, keys)
            self.graph.capture([*keys, *piecewise], self._frame, self._forward_frame)

    # ---- the protocol ---------------------------------------------------------------------------

    def launch(self, step: Step) -> None:
        """Run the step: asynchronously on CUDA, synchronously on a CPU. Raise `EngineDeadError` if it fails."""
        if self._closed:
            raise EngineDeadError("the engine was closed")
        with self._computing():
            self._launch(step)

    def result(self) -> StepResult:
        """The oldest unread step's tokens, as soon as they are on the host."""
        if not self._unread:
            raise EngineDeadError("a result was asked for, but every launched step was read")
        launched = self._unread.popleft()
        step, plan = launched.step, launched.plan
        try:
            arrays = launched.download.arrays()
        except RuntimeError as error:
            raise EngineDeadError(f"step {step.id} failed on {self.device}: {error}") from error
        tokens = np.zeros((step.rows, 1), np.int32)
        logprobs = None
        if arrays:
            tokens[step.sample, 0] = arrays[0]
        if plan is not None and len(arrays) > 1:
            found: list[Any] = [None] * step.rows
            rows = np.flatnonzero(step.sample)
            for row, entry in zip(rows, read_logprobs(plan, *arrays[1:]), strict=True):
                found[row] = entry
            logprobs = tuple(found)
        return StepResult(step.id, tokens, step.sample.astype(np.int32), logprobs)

    def arrived(self) -> bool:
        """Whether `result` would return, or raise, at once."""
        try:
            return not self._unread or self._unread[0].download.arrived()
        except RuntimeError:  # the device failed: `result` says how
            return True

    def abandon(self) -> None:
        """Close where the device may wait for a rank that is gone, and with it whoever waits for the device: nothing
        is taken down, and what is held there comes back when this process ends."""
        self._closed = True
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))  # nobody may collect it: graphs and links would wait

    def close(self) -> None:
        """Drop graphs, link, weights and KV; further launches raise. Closing twice is allowed."""
        if self._closed:
            return
        self._closed = True
        self.graph.close()
        self.comm.close()
        self._unread.clear()
        self._frames.clear()
        self._token_frames.clear()
        self.ctx.pool = None
        for kept in ("model", "attention", "_piecewise", "graph", "sampler", "_inputs"):
            delattr(self, kept)
        self.ctx.attention = self.ctx.moe = None  # type: ignore[assignment]
        if self.device.type == "cuda":
            gc.collect()  # modules and their backends refer to each other
            torch.cuda.empty_cache()

    # ---- one step -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _computing(self) -> Any:
        """On the engine's stream, without autograd; what torch raises means that the engine is dead."""
        stream: Any = torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext()
        try:
            with torch.inference_mode(), stream:
                yield
        except EngineDeadError:
            raise
        except RuntimeError as error:
            raise EngineDeadError(f"rank {self.rank} failed on {self.device}: {error}") from error

    def _launch(self, step: Step) -> None:
        sampling = self.rank == 0  # the others take rank 0's tokens, and need no sampling state
        if sampling:
            self.sampler.admit(step.admissions)
        self._inputs.update_page_table(step)
        plan = self.sampler.plan(step.req_pool_indices[step.sample]) if step.sample.any() else None
        ready = self._compute(step, plan)
        if ready is None:
            self._unread.append(_Launched(step, None, Download([])))
            return
        logits, choices = ready
        if sampling:
            sampled = self.sampler.sample(
                logits, choices.req_pool_indices, choices.positions, choices.plan, choices.groups
            )
        else:
            sampled = Sampled(torch.empty(len(choices.req_pool_indices), dtype=torch.int64, device=self.device))
        if self.size > 1:
            sampled = sampled._replace(tokens=self.comm.broadcast(sampled.tokens, src=0))
        self._last.index_put_((choices.req_pool_indices,), sampled.tokens)
        found = [t for t in sampled if t is not None]
        self._unread.append(_Launched(step, plan, Download(found, self._stream)))

    def _compute(self, step: Step, plan: SamplePlan | None) -> tuple[Tensor, SamplingInputs] | None:
        """Logits [sampled rows, vocab] and what to choose by, None where nobody samples: in the fewest launches."""
        key = self.graph.pick(step.rows, 1, step.num_decode == step.rows)
        if key is not None:
            return self._replay(step, key, plan)
        key = self.graph.pick_tokens(len(step.input_ids)) if self._piecewise is not None else None
        return self._forward(step, plan, key)

    def _forward(self, step: Step, plan: SamplePlan | None, key: Any) -> tuple[Tensor, SamplingInputs] | None:
        """Run the step operation by operation, or where there is a bucket ``key`` for its tokens, in pieces; returns
        what `_compute` does."""
        tokens, batch = self._inputs.build(step)
        self.attention.plan(batch)
        choices = None if plan is None else self._inputs.sampling_inputs(step, plan, batch)
        if key is not None:
            last = None if choices is None else choices.last_token_indices
            if choices is not None and last is None:  # every token is a row's last; of the bucket's, so many
                last = batch.cu_seqlens_q[1:] - 1
            hidden = self._replay_pieces(key, tokens, last)
        else:
            # Where nobody samples, KV is all that is wanted: any one token will do for the rest.
            hidden = self.model.forward(
                *self._resolve(tokens), batch.cu_seqlens_q[:1] if choices is None else choices.last_token_indices
            )
        return None if choices is None else (self.model.logits(hidden), choices)

    def _resolve(self, tokens: ModelInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Ids, positions and places, int64 [tokens]; each PENDING id replaced by what its slot sampled last."""
        ids, positions, out_cache_loc, slots = tokens.packed[:4].long().unbind()
        if tokens.pending:
            ids = torch.where(ids < 0, self._last.index_select(0, slots), ids)
        return ids, positions, out_cache_loc

    # ---- graphs ---------------------------------------------------------------------------------

    def _frame(self, key: Any) -> StaticInputs | PiecewiseInputBuffers:
        """The static inputs of a bucket, filled with padding; and planned for, if attention is recorded too."""
        if key.piecewise:
            self._token_frames[key] = PiecewiseInputBuffers(key, self.spec, self.device)
            return self._token_frames[key]
        own = getattr(self.graph, "input_buffers", None)
        frame: StaticInputs = (
            own(key, self.spec, self._inputs.page_table, self.device)
            if own is not None
            else self._inputs.graph_buffers(key)
        )
        self._frames[key] = frame
        self._plan(frame.fill(None), key)
        return frame

    def _plan(self, batch: AttnBatch, key: Any) -> None:
        """Plan for a bucket; one for rows with a shared prefix finds its length in a buffer of its own."""
        self.attention.plan(replace(batch, shared_prefix_len=self._inputs.shared_prefix_len) if key.shared else batch)

    def _forward_frame(self, frame: StaticInputs | PiecewiseInputBuffers) -> Tensor:
        """What a graph records, on static buffers only: from ids to logits [bucket rows, vocab]. In pieces, where few
        tokens are sampled from, to the hidden states of those."""
        if not isinstance(frame, PiecewiseInputBuffers):
            return self.model.logits(self.model.forward(*self._resolve(frame.tokens)))
        assert self._piecewise is not None
        with self._piecewise.in_bucket(0):
            return self.model.forward(*self._resolve(frame.tokens), frame.last_token_indices)

    def _replay(self, step: Step, key: Any, plan: SamplePlan | None) -> tuple[Tensor, SamplingInputs] | None:
        """Run a decode step by replaying its bucket; returns what `_compute` does."""
        if self._inputs.find_shared_prefix(step):
            key = min((k for k in self._frames if k.shared and k.rows >= step.rows), default=key)
        batch = self._frames[key].fill(self._inputs.decode_rows(step))
        self._plan(batch, key)
        logits = self.graph.run(key)
        return None if plan is None else (logits[: step.rows], self._inputs.sampling_inputs(step, plan, batch))

    def _replay_pieces(self, key: Any, tokens: ModelInputs, last: Tensor | None) -> Tensor:
        """Replay what lies between the attention of so few tokens; the hidden states of those in ``last`` int32 (None:
        nobody asks for any)."""
        frame = self._token_frames[key]
        frame.fill(tokens, last)
        assert self._piecewise is not None
        with self._piecewise.in_bucket(tokens.packed.shape[1]):
            hidden = self.graph.run(key)
        if last is None:
            return hidden
        return hidden[: len(last)] if frame.last_token_indices is not None else hidden.index_select(0, last)

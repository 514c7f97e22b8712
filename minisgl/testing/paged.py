"""Runs a model on batches that a test chooses, without an engine or a scheduler.

The page table is shuffled, so that consecutive pages of a sequence are not consecutive in the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minisgl.attention import AttentionBackend, AttnBatch
from minisgl.distributed import Communicator
from minisgl.kvcache.pool import KVPool
from minisgl.layers import Context
from minisgl.layers.weight_shards import WeightSource
from minisgl.models.config import ModelConfig
from minisgl.models.converter import Kernels, ModelConverter, load_converted
from minisgl.models.decoder import Model
from minisgl.models.weights import Checkpoint
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.models.dummy import Dummy
from minisgl.plugins.models.quantized import InMemory, quantization_of
from minisgl.plugins.moe import MoeBackend
from minisgl.plugins.quantization.base import Quantization

__all__ = ["PagedModel", "Row"]

Row = tuple[int, int, Sequence[int] | Tensor]
"""One row of a step: (req_pool_idx, first position computed, token ids to compute)."""


class PagedModel:
    """One rank of a model, with a KV pool for ``max_running_requests`` sequences of at most ``max_seq_len`` tokens.

    - ``path``: a checkpoint directory, or a config; a model built from a config has random weights.
    - ``comm``, ``attention``, ``moe``, ``fp8_gemm``: communicator and backends; by default the plugins named ``torch``.
    - ``kernels``: the part of the group ``kernels`` that converts the model.
    - ``quantize``: quantise weights while they are loaded: True is "fp8". An FP8 checkpoint is not changed.
    - ``quantization_options``: options of the part that reads quantised weights, in place of the defaults.
    - ``source``: weights to load in place of the checkpoint's.
    - ``manager``: loads the default plugins and model classes.
    - ``model``: the model class; by default the class that config.json names.

    ``bytes_read`` is the number of bytes that this rank read from the checkpoint.
    """

    def __init__(
        self,
        path: str | Path | ModelConfig,
        *,
        page_size: int = 16,
        max_seq_len: int = 128,
        max_running_requests: int = 4,
        comm: Communicator | None = None,
        attention: AttentionBackend | None = None,
        moe: MoeBackend | None = None,
        fp8_gemm: Any = None,
        kernels: str = "auto",
        quantize: bool | str = False,
        quantization_options: Any = None,
        source: WeightSource | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        manager: PluginManager | None = None,
        model: Callable[[ModelConfig, Context], Model] | None = None,
    ):
        manager = manager or PluginManager.load()
        device = torch.device(device)
        manager.load_all("models")
        read_config = manager.hook.minisgl_read_config
        self.config = path if isinstance(path, ModelConfig) else ModelConfig.from_dir(path, read_config)
        if moe is None and self.config.num_experts:
            moe = _make(manager, "moe", device=device)
        comm = comm or _make(manager, "communicator", rank=0, size=1, address="", device=device)
        self.attention: AttentionBackend = attention or _make(manager, "attention", device=device)
        converters: list[ModelConverter] = []
        quantization: Quantization | None = None
        if quantize or self.config.raw.get("quantization_config"):
            stored, wanted = (
                self.config.raw.get("quantization_config"),
                quantize if isinstance(quantize, str) else "fp8",
            )
            quantization = manager.build(
                "quantization",
                quantization_options
                or manager.make("quantization", quantization_of(stored, manager) if stored else wanted),
                device=device,
                dtype=dtype,
                build_part=lambda group: fp8_gemm or _make(manager, group, device=device),
            )
            quantization.read(self.config, bool(quantize))
            converters.append(InMemory(quantization, device))
        part: Kernels = manager.build("kernels", manager.make("kernels", kernels), device=device)
        converters.append(part)
        self.ctx = ctx = Context(comm, self.attention, device, dtype, lambda _: moe)
        kind: Any = manager.models()[self.config.architecture] if model is None else model
        manager.hook.minisgl_check_model(model=kind, config=self.config)
        self.model: Model = kind(self.config, ctx)
        self.bytes_read = 0
        if source is not None or isinstance(path, ModelConfig):
            load_converted(self.model, source or Dummy(), converters)
        else:
            with Checkpoint(path) if quantization is None else quantization.open(path) as checkpoint:
                load_converted(self.model, checkpoint, converters)
                self.bytes_read = checkpoint.bytes_read
        self.layers = self.model.attention_layers()
        columns = -(-max_seq_len // page_size)
        pages, first = max_running_requests * columns, self.layers[0]
        layout = self.attention.needs().layout
        sizes = (len(self.layers), pages + 1, page_size, first.kv_heads, first.head_dim)
        ctx.pool = self.pool = KVPool(*sizes, dtype, device, layout)
        shapes: list[Any] = getattr(self.model, "state_shapes", list)()
        slots = max_running_requests + 1
        ctx.states = [torch.full((slots, *shape), 9.0, dtype=dtype, device=device) for shape, dtype in shapes]
        self.attention.bind(self.pool, self.layers, [])
        shuffled = torch.randperm(pages, generator=torch.Generator().manual_seed(pages))
        scratch = torch.full((1, columns), pages)
        page_table = torch.cat((shuffled.view(max_running_requests, columns), scratch))
        self.page_table = page_table.to(device, torch.int32)  # [max_running_requests + 1, columns]

    @torch.inference_mode()
    def run(self, rows: Sequence[Row]) -> list[Tensor]:
        """Compute one step and return the logits of each row, [tokens, vocab] on the CPU.

        Raise ValueError unless the rows of one token come first.
        """
        counts = np.array([len(ids) for _, _, ids in rows], np.int32)
        starts = np.array([start for _, start, _ in rows], np.int32)
        single = counts == 1
        if not np.array_equal(single, np.sort(single)[::-1]):
            raise ValueError(f"expected the rows of one token first; the rows have {counts.tolist()} tokens")
        cu_seqlens_q = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        seq_lens = starts + counts
        req_pool_indices = torch.tensor([req_pool_idx for req_pool_idx, _, _ in rows], dtype=torch.int32)
        positions = torch.from_numpy(np.concatenate([np.arange(s, e) for s, e in zip(starts, seq_lens, strict=True)]))
        tokens = torch.cat([torch.as_tensor(ids, dtype=torch.long) for _, _, ids in rows])
        owner = torch.repeat_interleave(req_pool_indices.long(), torch.from_numpy(counts))
        size, device = self.pool.page_size, self.pool.device
        out_cache_loc = self.page_table.cpu()[owner, positions // size].long() * size + positions % size
        on_device = torch.from_numpy(cu_seqlens_q).to(device), torch.from_numpy(seq_lens).to(device)
        num_decode = int(single.sum())
        indices = req_pool_indices.to(device)
        self.ctx.batch = AttnBatch(num_decode, cu_seqlens_q, seq_lens, *on_device, indices, self.page_table)
        self.attention.plan(self.ctx.batch)
        hidden = self.model.forward(tokens.to(device), positions.to(device), out_cache_loc.to(device))
        return list(self.model.logits(hidden).cpu().split(counts.tolist()))


def _make(manager: PluginManager, group: str, **kwargs: Any) -> Any:
    return manager.build(group, manager.make(group, "torch"), **kwargs)

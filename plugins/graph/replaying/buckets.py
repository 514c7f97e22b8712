"""Interface of runners that record the launches of a step once, and replay them as one launch or in pieces.

A decode step can be replayed as one launch. Other steps, such as those with prompts, can be replayed in pieces: one
launch for each stretch between two calls of attention. Between the pieces, attention itself is launched anew, because
its kernels depend on the lengths of the rows (`piecewise.py` here). Steps without a bucket run operation by operation.

`ReplayingRunner` calls the methods; `Recorder` implements the recording.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from minisgl.core import I32

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.attention import AttentionBackend, AttnBatch, GraphKey
    from minisgl.config import Config
    from minisgl.engine.engine import TorchEngine
    from minisgl.engine.inputs import ModelInputs
    from minisgl.engine.model_runner import ModelRunner, StepRunner

__all__ = ["BucketRunner", "Buckets", "StaticInputs", "check_sizes"]


class StaticInputs(Protocol):
    """Input tensors of one bucket. They keep their addresses, because a recording reads from fixed addresses."""

    @property
    def tokens(self) -> ModelInputs:
        """Inputs of the model's forward pass.

        ``tokens.packed`` is int32 [4 or more, rows]: token ids (or PENDING), positions, out_cache_loc (KV locations to
        write: page · page_size + offset), request-pool indices.
        """

    def fill(self, packed: I32 | None) -> AttnBatch:
        """Copy the rows of a step into the buffers, and return the bucket's rows as the batch for attention to plan.

        ``packed`` is int32 [5, rows] on the host: token ids, positions, out_cache_loc, request-pool indices and
        sequence lengths, with at most as many rows as the bucket has. The remaining rows of the bucket (all rows, if
        ``packed`` is None) become padding: each computes position 0 of the scratch request-pool row and writes its KV
        to the scratch page.
        """


class BucketRunner:
    """The base of graph runners that record decode steps by number of rows, rounded up to a bucket, and replay them.

    Two optional methods are not defined here. A runner with ``input_buffers(key, spec, page_table, device)`` allocates
    the `StaticInputs` of each bucket itself; without the method, they are `GraphInputBuffers`. A runner with
    ``piecewise(max_tokens)`` returns buckets for steps with prompts, which have at most ``max_tokens`` tokens (a
    `GraphKey` with ``q_len`` 0); it must then also have ``pick_tokens(tokens)``, which returns the bucket for a step of
    ``tokens`` tokens, or None.
    """

    def buckets(self, max_rows: int) -> Sequence[GraphKey]:
        """Return the buckets of decode rows to record; no step has more than ``max_rows`` decode rows. Empty: none."""
        raise NotImplementedError

    def capture(
        self,
        keys: Sequence[GraphKey],
        build: Callable[[GraphKey], Any],
        forward: Callable[[Any], Tensor],
    ) -> None:
        """Record ``forward(build(key))`` for each key, where ``build(key)`` allocates the bucket's input buffers.

        Record each bucket before the next call of ``build``, which also prepares attention for its own bucket.
        A key whose ``piecewise`` is True is recorded in pieces (see ``record`` of `Recorder`).
        """
        raise NotImplementedError

    def pick(self, rows: int, q_len: int, uniform: bool) -> GraphKey | None:
        """Return the smallest recorded bucket for a step of ``rows`` rows. None: do not replay it as one launch.

        ``q_len`` is the number of query tokens of a row; ``uniform`` is True if all rows have that number.
        """
        raise NotImplementedError

    def run(self, key: GraphKey) -> Tensor:
        """Replay a bucket, whose input buffers the caller has filled. Return the recorded output buffer."""
        raise NotImplementedError

    def close(self) -> None:
        """Drop the recordings. Called before the engine closes the communicator."""
        raise NotImplementedError

    def wrap_attention(self, backend: AttentionBackend, max_tokens: int) -> AttentionBackend:
        """Return a `PiecewiseAttention` around ``backend``, if steps with prompts are recorded, or else ``backend``."""
        from minisgl.plugins.graph.replaying.piecewise import PiecewiseAttention

        recorded = self.piecewise(max_tokens) if hasattr(self, "piecewise") else ()
        return PiecewiseAttention(backend) if recorded else backend

    def wrap(self, runner: ModelRunner) -> StepRunner:
        """Return a runner of steps that replays this runner's recordings."""
        from minisgl.plugins.graph.replaying.runner import ReplayingRunner

        return ReplayingRunner(runner, self)

    def warm_up(self, engine: TorchEngine, config: Config, *, drafting: bool) -> None:
        """Compute steps of all kinds on a GPU, so that no request waits for a compiler."""
        from minisgl.plugins.graph.replaying.warmup import warm_up

        warm_up(engine, config, drafting=drafting)


class Buckets:
    """Recorded buckets without shared prefix, by size: of decode rows (``q_len`` 1) and of tokens (``q_len`` 0)."""

    def __init__(self, keys: Iterable[GraphKey] = ()):
        self._keys: dict[int, list[GraphKey]] = {}
        for key in sorted(key for key in keys if not key.shared_prefix):
            self._keys.setdefault(key.q_len, []).append(key)

    def smallest(self, rows: int, q_len: int) -> GraphKey | None:
        """Return the smallest bucket of ``q_len`` that holds ``rows`` rows (tokens, if ``q_len`` is 0), or None."""
        keys = self._keys.get(q_len, [])
        i = bisect_left(keys, rows, key=lambda key: key.rows)
        return keys[i] if i < len(keys) else None


def check_sizes(max_rows: int, max_tokens: int) -> None:
    """Raise ValueError unless ``max_rows`` is at least 1 and ``max_tokens`` at least 0."""
    if max_rows < 1 or max_tokens < 0:
        raise ValueError(
            f"graph.max_rows={max_rows} must be at least 1, and graph.max_tokens={max_tokens} at least 0 (0: off)"
        )

"""The built-in graph runners (group `graph`), one file each, and the interface of a graph runner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from minisgl.attention import AttentionBackend
    from minisgl.config import Config
    from minisgl.engine.engine import TorchEngine
    from minisgl.engine.model_runner import ModelRunner, StepRunner

__all__ = ["GraphRunner"]


class GraphRunner(Protocol):
    """What the group `graph` builds: it wraps the runner of steps, to launch the same work with less host time.

    Every rank has its own. What a wrapper does, such as replaying recorded launches, is its own matter: a runner that
    records steps is a `minisgl.plugins.graph.replaying.BucketRunner`.
    """

    def wrap_attention(self, backend: AttentionBackend, max_tokens: int) -> AttentionBackend:
        """Return the attention backend that the model's layers call: ``backend`` itself, or an object that wraps it.

        Called once, before the model is built. No step with prompts has more than ``max_tokens`` tokens.
        """

    def wrap(self, runner: ModelRunner) -> StepRunner:
        """Return a runner of the same steps with the same results, or ``runner`` itself.

        Called once, when weights, KV pool and page table exist, and before ``start`` of the returned runner. It must
        allocate nothing on the device.
        """

    def warm_up(self, engine: TorchEngine, config: Config, *, drafting: bool) -> None:
        """Compute what it likes before the first request. Called once on each rank, after the start of the runner.

        With ``drafting``, steps may verify drafts.
        """

"""Interface of the group `graph`: a part that wraps the runner of steps, to launch the same work with less host time.

The core computes every step with `ModelRunner`, operation by operation. What a wrapper does instead, such as replaying
recorded launches, is its own matter: see `plugins/graph/`.
"""

from __future__ import annotations

from typing import Protocol

from minisgl.attention import AttentionBackend
from minisgl.engine.model_runner import ModelRunner, StepRunner

__all__ = ["GraphRunner"]


class GraphRunner(Protocol):
    """What the group `graph` builds. A runner that records steps is a `minisgl.plugins.graph.replaying.BucketRunner`.

    Every rank has its own.
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

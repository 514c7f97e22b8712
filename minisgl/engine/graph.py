"""What a graph runner is asked for: record the launches of a decode step once, replay them as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from minisgl.attention import GraphKey

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["GraphKey", "GraphRunner"]


class GraphRunner(Protocol):
    """Records and replays decode steps by batch-size bucket."""

    def buckets(self, max_rows: int) -> Sequence[GraphKey]:
        """The buckets it wants for at most ``max_rows`` decode rows; none: every step runs eagerly."""

    def capture(
        self,
        keys: Sequence[GraphKey],
        build: Callable[[GraphKey], Any],
        forward: Callable[[Any], Tensor],
    ) -> None:
        """For each key, ``build`` its static input buffers and record ``forward`` on them."""

    def pick(self, rows: int, q_len: int, uniform: bool) -> GraphKey | None:
        """The smallest captured bucket for a step of ``rows`` rows, or None: run it eagerly."""

    def run(self, key: GraphKey) -> Tensor:
        """Replay; the inputs were written into ``build(key)``'s buffers. Returns the recorded output buffer."""

    def close(self) -> None:
        """Drop the recordings; called before the communicator closes."""

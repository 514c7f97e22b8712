"""How several ranks run: rank 0 sends each step to the others as bytes, and they execute the steps in order.

`Peers` are rank 0's connections to the other ranks, and `follow` is the loop of each of them. The plugins of
`plugins/ranks` start the ranks: those of a server, connected over ZeroMQ, and those of a program whose own process is
rank 0. torchrun connects its ranks over TCP.
"""

from __future__ import annotations

from collections.abc import Callable

from minisgl.core import Engine, Step

MAX_IN_FLIGHT = 2
"""The largest number of steps in flight: launched by the engine, with a result that the caller has not read yet."""


class Peers:
    """Rank 0's connections to the other ranks. `TorchEngine.launch` sends each step to all of them (promise 7)."""

    def send(self, data: bytes) -> None:
        """Deliver an encoded step to every rank, in order and without loss."""
        raise NotImplementedError

    def end(self) -> None:
        """Tell every rank that no step follows. Their `follow` then returns."""
        raise NotImplementedError

    def wait(self, ready: Callable[[], bool]) -> None:
        """Return when ``ready()`` is true, or at once if these ranks are not watched here, as those of a server.

        ``ready`` tells whether rank 0 has the result of a step. Raise `EngineDeadError` if a rank exits before.
        """

    def exited(self) -> str:
        """Return which ranks have exited, as text. Return "" if all of them run, or if this is not known here."""
        return ""

    def close(self, failed: bool) -> None:
        """Wait for the end of the ranks, as far as they are this process's matter. A rank may have ``failed``."""
        return


def follow(engine: Engine, receive: Callable[[], bytes | None]) -> None:
    """Launch rank 0's steps on this rank's engine until ``receive`` returns None. Ranks above 0 call it.

    ``receive`` blocks until the next encoded step arrives. With `MAX_IN_FLIGHT` steps in flight, the function waits for
    the result of the oldest one before it launches another step. So a rank runs no further ahead of its device than
    rank 0 does. The caller closes the engine. Raises `EngineDeadError` if the device or another rank fails.
    """
    in_flight = 0
    while (data := receive()) is not None:
        if in_flight == MAX_IN_FLIGHT:
            engine.result()
            in_flight -= 1
        engine.launch(Step.decode(data))
        in_flight += 1
    for _ in range(in_flight):
        engine.result()

"""The connection of two ranks through a proxy: heartbeats, and how each side notices that the other one is gone."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from minisgl.cluster.multi_node.frames import ChannelError, EndOfSteps, Frame, Leaving, RankReady, Session, Welcome
from minisgl.cluster.multi_node.link import BEAT_SECONDS, SILENCE_SECONDS, Link
from minisgl.testing.proxy import BOTH, Direction, Proxy
from minisgl.testing.serving import patient_timeout

BEAT, SILENCE = 0.05, 1.0


class Side:
    """One side of a connection, with what its link reports. ``died`` is the time of the report."""

    def __init__(self, sock: socket.socket, session: Session, peer: str):
        self.messages: queue.Queue[Frame] = queue.Queue()
        self.reasons: queue.Queue[str] = queue.Queue()
        self.died = 0.0
        self.socket = sock
        self.link = Link(sock, session, peer, self.messages.put, self._die, BEAT, SILENCE)
        self.link.start()

    def _die(self, reason: str) -> None:
        self.died = time.monotonic()
        self.reasons.put(reason)

    def reason(self) -> str:
        """Wait until the link reports that the other side is gone, and return the reason."""
        return self.reasons.get(timeout=patient_timeout(30))


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        return listener.accept()[0], client


@contextmanager
def connected() -> Iterator[tuple[Side, Side, Proxy]]:
    """Yield rank 0's side and rank 1's side of a connection, and the proxy between them."""
    down, up = os.urandom(32), os.urandom(32)
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, Proxy(f"127.0.0.1:{listener.getsockname()[1]}") as proxy:
        client = socket.create_connection(("127.0.0.1", int(proxy.address.rpartition(":")[2])))
        server, _ = listener.accept()
        leader = Side(server, Session(down, up), "rank 1")
        follower = Side(client, Session(up, down), "rank 0")
        try:
            yield leader, follower, proxy
        finally:
            leader.link.close()
            follower.link.close()


def test_idle_link_stays() -> None:
    """Heartbeats keep an idle connection, also a slow one. Messages pass in both directions afterwards."""
    with connected() as (leader, follower, proxy):
        proxy.delay = SILENCE / 4
        time.sleep(2 * SILENCE)
        assert leader.reasons.empty() and follower.reasons.empty()
        leader.link.send(EndOfSteps())
        follower.link.send(RankReady())
        assert follower.messages.get(timeout=patient_timeout(30)) == EndOfSteps()
        assert leader.messages.get(timeout=patient_timeout(30)) == RankReady()


def test_leaving() -> None:
    """`Link.leave` is for signal handlers: it also works while this thread holds the link's lock."""
    with connected() as (leader, follower, _):
        with follower.link._lock:
            follower.link.leave()
        assert leader.messages.get(timeout=patient_timeout(30)) == Leaving()


@pytest.mark.parametrize("directions", [BOTH, ("up",), ("down",)])
def test_promise_10_cut_link(directions: tuple[Direction, ...]) -> None:
    """A link that is cut, in one direction or both, is noticed on both sides.

    The side that still receives sees that the other one closes the connection, or stops its heartbeats."""
    with connected() as (leader, follower, proxy):
        assert leader.reasons.empty()
        proxy.cut(directions)
        first, second = (leader, follower) if "up" in directions else (follower, leader)
        assert "no sign of life" in first.reason()
        assert ("no sign of life" if len(directions) == 2 else "closed the connection") in second.reason()


def test_promise_10_times() -> None:
    """The real limits: a cut link ends both sides within 10 s. The worst case is a heartbeat that has just arrived."""
    assert SILENCE_SECONDS + 2 * BEAT_SECONDS < 9.0
    assert 3 * BEAT_SECONDS < SILENCE_SECONDS  # a few late heartbeats are no alarm


@pytest.mark.parametrize("direction", BOTH)
def test_lost_bytes(direction: Direction) -> None:
    """Lost bytes are noticed by the side that should have received them, which ends the connection for both."""
    with connected() as (leader, follower, proxy):
        victim, other = (leader, follower) if direction == "up" else (follower, leader)
        proxy.lose[direction] = 1
        assert "frame" in victim.reason()
        assert other.reason()


def test_promise_10_closed_connection() -> None:
    """The end of the other process closes its socket, which is noticed at once: long before the silence."""
    with connected() as (leader, follower, _):
        began = time.monotonic()
        leader.socket.shutdown(socket.SHUT_RDWR)
        assert "closed the connection" in follower.reason()
        assert follower.died - began < patient_timeout(SILENCE)


def test_close_is_no_death() -> None:
    """`Link.close` delivers its last message. Afterwards neither side reports that the other one is gone."""
    with connected() as (leader, follower, _):
        follower.link.send(RankReady())
        assert leader.messages.get(timeout=patient_timeout(30)) == RankReady()
        follower.link._on_message = lambda message: (follower.link.close(), follower.messages.put(message))
        leader.link.close(EndOfSteps())
        assert follower.messages.get(timeout=patient_timeout(30)) == EndOfSteps()
        for side in (leader, follower):
            side.link._thread.join(patient_timeout(30))
            assert not side.link._thread.is_alive() and side.reasons.empty() and side.socket.fileno() == -1


def test_pieces_of_a_frame_are_no_sign_of_life() -> None:
    """A peer that sends single bytes, but no whole frame, is gone after the silence."""
    ours, theirs = tcp_pair()
    side = Side(ours, Session(bytes(32), bytes(32)), "rank 1")
    frame = bytearray((1 << 20).to_bytes(4, "big") + bytes(1000))
    while side.reasons.empty() and frame:
        theirs.send(frame[:1])
        del frame[:1]
        time.sleep(SILENCE / 50)
    assert "no sign of life" in side.reason()
    theirs.close()


def test_full_buffer() -> None:
    """If the other side reads nothing, `send` raises after the silence, and the heartbeats do not block meanwhile."""
    ours, theirs = tcp_pair()
    side = Side(ours, Session(bytes(32), bytes(32)), "rank 1")
    message = Welcome("", bytes(64 << 20), {})  # more than the buffers of both sides
    with pytest.raises(ChannelError, match="can't send"):
        side.link.send(message)
    assert "no sign of life" in side.reason()
    theirs.close()


def test_silence_while_a_send_blocks() -> None:
    """The link's thread waits for no other thread: it notices the silence while the main thread holds the lock."""
    ours, theirs = tcp_pair()
    side = Side(ours, Session(bytes(32), bytes(32)), "rank 1")
    with side.link._lock:
        assert "no sign of life" in side.reason()
    theirs.close()


def test_silence_with_a_full_buffer() -> None:
    """A heartbeat that does not fit into the buffer is left out: a heartbeat that waits would delay the alarm."""
    ours, theirs = tcp_pair()
    ours.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            ours.send(bytes(1 << 20))
    side = Side(ours, Session(bytes(32), bytes(32)), "rank 1")
    assert "no sign of life" in side.reason()
    theirs.close()


def test_error_of_the_receiver() -> None:
    """An error in the handling of a message ends the link, as a dead peer does: it is not lost in a thread."""
    handlers: list[Callable[[Frame], None]] = []
    with connected() as (leader, follower, _):
        handlers.append(leader.link._on_message)
        leader.link._on_message = lambda message: handlers[1](message)
        follower.link.send(RankReady())
        assert "IndexError" in leader.reason()
        assert "closed the connection" in follower.reason()

"""Rank 0's connections to other ranks, without engines: who is let in, what arrives, and how the end is noticed."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from minisgl.cluster.multi_node import remote_ranks
from minisgl.cluster.multi_node.frames import (
    EndOfSteps,
    Frame,
    Leaving,
    RankFailed,
    RankReady,
    StepFrame,
    Welcome,
)
from minisgl.cluster.multi_node.handshake import WrongSecretError, greet
from minisgl.cluster.multi_node.link import Link
from minisgl.cluster.multi_node.remote_ranks import RemoteRanks
from minisgl.config import ConfigError
from minisgl.testing.serving import patient_timeout
from minisgl.utils.version import __version__

SECRET = b"0123456789abcdef"
WELCOME = Welcome("127.0.0.1:1", b"config", {})


def encoded_step(number: int) -> bytes:
    return bytes([0x91, number])  # a MessagePack array with the id; the rest of a step is not read here


class Rank:
    """A rank above 0, with what it received."""

    def __init__(self, address: str, rank: int, size: int, secret: bytes = SECRET):
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)))
        self.messages: queue.Queue[Frame] = queue.Queue()
        self.reasons: queue.Queue[str] = queue.Queue()
        try:
            session = greet(self.socket, secret, __version__, rank, size)
        except BaseException:
            self.socket.close()
            raise
        self.link = Link(self.socket, session, "rank 0", self.messages.put, self.reasons.put)
        self.link.start()

    def next(self) -> Frame:
        return self.messages.get(timeout=patient_timeout(30))


class Leader(RemoteRanks):
    """Rank 0 of ``size``. ``deaths`` and ``leaving`` are the calls that its links made."""

    def __init__(self, size: int):
        self.deaths: queue.Queue[tuple[str, bool]] = queue.Queue()
        self.leaving = threading.Event()
        super().__init__(size, SECRET, lambda *death: self.deaths.put(death), self.leaving.set)
        self.listen("127.0.0.1", 0)
        self.errors: list[BaseException] = []

    def connect_in_thread(self, seconds: float = 60.0) -> threading.Thread:
        def run() -> None:
            try:
                self.connect(seconds, WELCOME)
            except BaseException as error:
                self.errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread


@contextmanager
def connected(size: int) -> Iterator[tuple[Leader, dict[int, Rank]]]:
    """Yield rank 0 and the other ranks, all connected. They connect in descending order."""
    leader = Leader(size)
    thread = leader.connect_in_thread()
    ranks = {rank: Rank(leader.address, rank, size) for rank in reversed(range(1, size))}
    try:
        assert [rank.next() for rank in ranks.values()] == [WELCOME] * (size - 1)
        thread.join(patient_timeout(30))
        yield leader, ranks
    finally:
        leader.end()
        for rank in ranks.values():
            rank.link.close()


def test_promise_7_steps_reach_all_ranks_in_order() -> None:
    with connected(4) as (leader, ranks):
        for i in range(100):
            leader.send(encoded_step(i))
        leader.end()
        for rank in ranks.values():
            assert [rank.next() for _ in range(100)] == [StepFrame(encoded_step(i)) for i in range(100)]
            assert rank.next() == EndOfSteps()
        assert leader.deaths.empty()


def test_waits_for_all_ranks_to_be_ready() -> None:
    with connected(3) as (leader, ranks):
        done = threading.Event()
        threading.Thread(target=lambda: (leader.wait_until_ready(), done.set()), daemon=True).start()
        ranks[2].link.send(RankReady())
        assert not done.wait(0.2)
        ranks[1].link.send(RankReady())
        assert done.wait(patient_timeout(30))


def end_connection(rank: Rank) -> None:
    rank.socket.shutdown(socket.SHUT_RDWR)


def report_failure(rank: Rank) -> None:
    rank.link.send(RankFailed("ValueError: no"))


def report_wrong_option(rank: Rank) -> None:
    rank.link.send(RankFailed("page_size=3: no", options=True))


def send_what_only_rank_0_sends(rank: Rank) -> None:
    rank.link.send(EndOfSteps())


@pytest.mark.parametrize(
    ("action", "reason", "options"),
    [
        (end_connection, "closed the connection", False),
        (report_failure, "ValueError: no", False),
        (report_wrong_option, "page_size=3: no", True),
        (send_what_only_rank_0_sends, "EndOfSteps", False),
    ],
)
def test_promise_10_death_of_a_rank(action: Callable[[Rank], None], reason: str, options: bool) -> None:
    """The death of any rank is reported, with its number and the reason, without a step on the way."""
    with connected(3) as (leader, ranks):
        action(ranks[2])
        text, option = leader.deaths.get(timeout=patient_timeout(30))
        assert text.startswith("rank 2 (127.0.0.1): ") and reason in text and option == options


def test_leaving() -> None:
    with connected(2) as (leader, ranks):
        ranks[1].link.send(Leaving())
        assert leader.leaving.wait(patient_timeout(30))


def test_strangers_do_not_disturb() -> None:
    """Connections that are silent, send junk or have another secret do not keep the ranks from connecting."""
    leader = Leader(2)
    host, _, port = leader.address.rpartition(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(3)]
    thread = leader.connect_in_thread()
    silent[0].sendall(b"\xff" * 1000)
    with pytest.raises(WrongSecretError):
        Rank(leader.address, 1, 2, b"another secret!!")
    rank = Rank(leader.address, 1, 2)
    assert rank.next() == WELCOME
    thread.join(patient_timeout(30))
    assert not thread.is_alive() and not leader.errors and leader.deaths.empty()
    with pytest.raises(OSError):  # all ranks are here: nothing listens any more
        socket.create_connection((host, int(port)))
    leader.end()
    for sock in silent:
        sock.close()


def test_too_many_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above `MAX_HANDSHAKES`, a connection is closed. Ranks can connect when the time of the others is over."""
    monkeypatch.setattr(remote_ranks, "MAX_HANDSHAKES", 2)
    monkeypatch.setattr("minisgl.cluster.multi_node.handshake.HANDSHAKE_SECONDS", 1.0)
    leader = Leader(2)
    host, _, port = leader.address.rpartition(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(2)]
    thread = leader.connect_in_thread()
    extra = socket.create_connection((host, int(port)))
    extra.settimeout(patient_timeout(30))
    assert extra.recv(1) == b""
    assert [sock.recv(1) for sock in silent] == [b"", b""]
    monkeypatch.setattr("minisgl.cluster.multi_node.handshake.HANDSHAKE_SECONDS", patient_timeout(30))
    assert Rank(leader.address, 1, 2).next() == WELCOME
    thread.join(patient_timeout(30))
    leader.end()
    for sock in (*silent, extra):
        sock.close()


def test_second_connection_of_a_rank_is_refused() -> None:
    """The first connection of a rank stays; the second one is closed."""
    leader = Leader(3)
    thread = leader.connect_in_thread()
    first = Rank(leader.address, 1, 3)
    while 1 not in leader._links:
        time.sleep(0.01)
    second = Rank(leader.address, 1, 3)
    assert "closed the connection" in second.reasons.get(timeout=patient_timeout(30))
    other = Rank(leader.address, 2, 3)
    assert first.next() == other.next() == WELCOME
    thread.join(patient_timeout(30))
    leader.end()


def test_missing_ranks_are_named() -> None:
    leader = Leader(4)
    thread = leader.connect_in_thread(1.0)
    Rank(leader.address, 2, 4)
    thread.join(patient_timeout(30))
    assert isinstance(leader.errors[0], TimeoutError) and "rank 1, 3 to 127.0.0.1:" in str(leader.errors[0])


def test_address_that_can_not_be_used() -> None:
    """An address of another machine, or a port that is taken, is a wrong option."""
    leader = Leader(2)
    for host, port in (("192.0.2.1", 0), ("127.0.0.1", int(leader.address.rpartition(":")[2]))):
        with pytest.raises(ConfigError, match="multi_node"):
            RemoteRanks(2, SECRET, lambda reason, options: None, lambda: None).listen(host, port)
    leader._listener.close()

"""Frames between ranks: what is refused. All tests work on bytes, without sockets."""

from __future__ import annotations

import copy
import hmac
import os
import pickle
import tracemalloc
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from minisgl.cluster.multi_node.frames import (
    Beat,
    ChannelError,
    EndOfSteps,
    Frame,
    Session,
    StepFrame,
    Welcome,
    step_id,
)
from minisgl.core import Step

I32 = np.int32


def sessions(max_body: int = 1 << 20) -> tuple[Session, Session]:
    """Return both sides of a new session."""
    down, up = os.urandom(32), os.urandom(32)
    return Session(down, up, max_body), Session(up, down, max_body)


def step(number: int, tokens: int = 3) -> Step:
    """Return a step that decodes ``tokens`` rows."""
    rows, none = np.arange(tokens, dtype=I32), np.zeros(0, I32)
    ones = np.ones(tokens, I32)
    return Step(number, rows, rows, ones, ones, tokens, 0, rows, (none, none, none))


def received(session: Session, data: bytes) -> list[Frame]:
    """Return all messages that ``data`` completes."""
    session.feed(data)
    return list(iter(session.next, None))


def test_messages_arrive_in_order() -> None:
    """Messages arrive whole and in order, in both directions, however their bytes are cut."""
    a, b = sessions()
    messages = [Welcome("10.0.0.1:4321", b"config", {"p": "0f"}), Beat(), StepFrame(step(0).encode()), EndOfSteps()]
    data = b"".join(a.seal(message) for message in messages)
    got = [message for at in range(len(data)) for message in received(b, data[at : at + 1])]
    assert got == messages
    assert received(a, b.seal(Beat()) + b.seal(Beat())) == [Beat(), Beat()]


@pytest.mark.parametrize("number", [0, 127, 128, 70_000, 2**40])
def test_id_of_a_step(number: int) -> None:
    encoded = replace(step(number), id=number).encode()
    assert step_id(encoded) == Step.decode(encoded).id == number


@pytest.mark.parametrize("rounds", [1, 3])
def test_rounds_of_a_step(rounds: int) -> None:
    assert Step.decode(replace(step(0), rounds=rounds).encode()).rounds == rounds


def test_every_changed_byte_is_refused() -> None:
    """A frame with one changed bit is refused, wherever the bit is; a changed length at the latest with more bytes."""
    a, _ = sessions()
    frame = a.seal(StepFrame(step(0).encode()))
    for at in range(len(frame)):
        a, b = sessions(max_body=4096)
        frame = bytearray(a.seal(StepFrame(step(0).encode())))
        frame[at] ^= 0x10
        with pytest.raises(ChannelError, match=r"forged|at most"):
            received(b, bytes(frame) + bytes(5000))


def test_replayed_reordered_and_lost_frames_are_refused() -> None:
    a, b = sessions()
    first, second, third = (a.seal(StepFrame(step(i).encode())) for i in range(3))
    assert len(received(b, first)) == 1
    for wrong in (first, third):
        with pytest.raises(ChannelError, match=r"frame \d arrived in place of frame 1"):
            received(copy.deepcopy(b), wrong)
    assert len(received(b, second)) == 1


def test_frames_of_other_sessions_and_directions_are_refused() -> None:
    """A recorded frame is worth nothing in another session, nor when it is sent back to its sender."""
    a, b = sessions()
    other, _ = sessions()
    for data, to in ((other.seal(Beat()), b), (a.seal(Beat()), a)):
        with pytest.raises(ChannelError, match="forged"):
            received(to, data)


def test_size_is_checked_before_the_body() -> None:
    """A frame that announces too much is refused when its header has arrived. A permitted size allocates nothing."""
    _, b = sessions(max_body=1000)
    with pytest.raises(ChannelError, match="announces 1001 bytes"):
        received(b, (1001).to_bytes(4, "big") + bytes(40))
    _, b = sessions(max_body=256 << 20)
    tracemalloc.start()
    try:
        assert received(b, (256 << 20).to_bytes(4, "big") + bytes(40)) == []
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_too_large_message_is_not_sent() -> None:
    a, _ = sessions(max_body=1000)
    with pytest.raises(ChannelError, match="too large"):
        a.seal(StepFrame(step(0, tokens=1000).encode()))


class Bomb:
    """An object whose unpickling makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


def test_other_bodies_are_refused(tmp_path: Path) -> None:
    """A body with a right tag that is no message is refused. A pickle is not loaded."""
    made = tmp_path / "made"
    wrong_step = msgspec.msgpack.encode(StepFrame(b"\xc1"))
    for body in (b"", b"\xc1", b"\x93\xa4Beat", b"[]", pickle.dumps(Bomb(made)), b"\x91" * 5000, wrong_step):
        key, other = os.urandom(32), os.urandom(32)
        header = len(body).to_bytes(4, "big") + (0).to_bytes(8, "big")
        frame = header + hmac.digest(key, header + body, "sha256") + body
        with pytest.raises(ChannelError, match="no message"):
            received(Session(other, key), frame)
    assert not made.exists()


@pytest.mark.parametrize("ids", [(1,), (0, 0), (0, 2), (0, 1, 0)])
def test_promise_7_step_ids_have_no_gaps(ids: tuple[int, ...]) -> None:
    """A step that is not the next one is refused, even in an authentic frame."""
    a, b = sessions()
    data = b"".join(a.seal(StepFrame(step(i).encode())) for i in ids)
    with pytest.raises(ChannelError, match=f"step {ids[-1]} arrived in place of step {len(ids) - 1}"):
        received(b, data)

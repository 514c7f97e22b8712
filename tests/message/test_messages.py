"""Messages are decoded to what was encoded, and the queues drop no message."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from minisgl.core import Finished, Output, SamplingParams
from minisgl.message import (
    Abort,
    Accepted,
    Call,
    ChatPrompt,
    Delta,
    Limits,
    Message,
    NewRequest,
    Outputs,
    Replies,
    Schedule,
    Stop,
    Submit,
    TextPrompt,
    TokensPrompt,
    decode,
    pack_ids,
    unpack_ids,
)
from minisgl.message.queue import Addresses, Pull, Push

PARAMS = SamplingParams(
    max_tokens=5, seed=-(2**63), stop=("a", "🙂"), stop_token_ids=(1,), logit_bias={7: -100.0}, logprobs=2
)
END = Finished(7, "error", 1, 2, 3, 4, "it broke", 400, "prompt", "invalid_value")
ALL: list[Message] = [
    Submit([1, 2], TextPrompt("héllo", add_special_tokens=False), PARAMS, max_tokens_from_context=True),
    Submit([1], TokensPrompt(pack_ids([1, 2])), SamplingParams()),
    Submit([1], ChatPrompt([{"role": "user", "content": "x", "n": [1, None]}], False, {"a": {"b": 1.5}}), PARAMS),
    Abort([1, 2**40]),
    Limits(2048, 151_936),
    Schedule([5, 6], pack_ids([6, 7]), PARAMS),
    Call("module:name", [b"\xff", None, {"a": 1.5}]),
    Stop(),
    Outputs([NewRequest(1, [2, 3], PARAMS)], Output([1, 2], [3, 4], [END], {1: (-0.5, (4, 5), (-0.5, -1.5))})),
    Accepted([1, 2], [7, 9]),
    Replies([Delta(1, "x🙂", [2], [["x", b"\xff", -1.0, [["y", b"y", -2.0]]]], END, "stop")]),
    Replies([Delta(1, prompt_logprobs=[None, [[5, "x", -1.0, None, b""], [6, "y", -0.5, 1, b""]]])]),
]


@pytest.mark.parametrize("message", ALL, ids=lambda message: type(message).__name__)
def test_encode_decode_round_trip(message: Message) -> None:
    assert decode(message.encode()) == message


def test_all_message_types_are_tested() -> None:
    assert {type(message) for message in ALL} == set(Message.__subclasses__())


def test_invalid_bytes_raise() -> None:
    for data in (b"\x00", msgspec.msgpack.encode(["NoSuchMessage", 1]), msgspec.msgpack.encode(["Abort", "x"])):
        with pytest.raises(msgspec.ValidationError):
            decode(data)


def test_unpack_ids_returns_writable_int32() -> None:
    ids = unpack_ids(pack_ids([0, 1, 2**31 - 1]))
    assert ids.dtype == np.int32
    assert ids.tolist() == [0, 1, 2**31 - 1]
    assert ids.flags.writeable
    assert len(pack_ids(range(1000))) == 4000
    with pytest.raises(OverflowError):
        pack_ids([2**31])


def test_outputs_message_is_small() -> None:
    """The tokens of 256 requests of one step are one message of less than 9 bytes for each token."""
    output = Output(list(range(1000, 1256)), list(range(150_000, 150_256)))
    assert len(Outputs([], output).encode()) < 256 * 9


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def addresses() -> Iterator[Addresses]:
    addresses = Addresses.make(tokenizers=2, tp=2)
    yield addresses
    addresses.remove()


def test_queue_keeps_all_messages_in_order(context: zmq.Context[zmq.Socket[bytes]], addresses: Addresses) -> None:
    """No message is lost, and each sender's messages keep their order.

    The test sends more messages than ZeroMQ's default bound of 1000, and one sender starts before the receiver.
    """
    count = 5000
    early = Push(context, addresses.api)
    for i in range(count):
        early.send(Call("module:name", [i]))
    inbox = Pull(context, addresses.api)

    def send() -> None:
        late = Push(context, addresses.api)
        for i in range(count):
            late.send(Abort([i]))
        late.close(linger=60.0)  # with linger=0, close discards the messages that are not sent yet

    thread = threading.Thread(target=send)
    thread.start()
    seen: dict[type, list[int]] = {Call: [], Abort: []}
    while sum(map(len, seen.values())) < 2 * count:
        for message in inbox.drain(block=True):
            seen[type(message)].append(message.arguments[0] if isinstance(message, Call) else message.uids[0])  # type: ignore[union-attr]
    thread.join()
    assert seen == {Call: list(range(count)), Abort: list(range(count))}
    assert not inbox.ready()
    assert list(inbox.drain(block=False)) == []


def test_addresses_are_unique() -> None:
    """Two servers share no address."""
    one, other = Addresses.make(2, 3), Addresses.make(2, 3)
    names = [a for each in (one, other) for a in (each.api, each.scheduler, each.detokenizer, *each.tokenizers)]
    assert len(set(names)) == len(names) == 10
    assert len(one.followers) == 2
    alone = Addresses.make(0, 1)
    assert alone.tokenizers == [alone.detokenizer]
    alone.remove()
    for each in (one, other):
        each.remove()


def test_junk_is_dropped_and_counted(
    context: zmq.Context[zmq.Socket[bytes]], addresses: Addresses, caplog: pytest.LogCaptureFixture
) -> None:
    """Bytes that are no message never reach the receiver, whichever way it receives, and cause few log lines."""
    inbox, push = Pull(context, addresses.api), Push(context, addresses.api)
    junk = [
        b"\xff\x00\x01",
        b"",
        b"\x91\xa4Nope",
        b"\x91\xa9Query\xff",
        b"\x91" * 5000,
        b"\x92\xa5Abort\x91\xa1x",
    ]
    for data in junk:
        push.send_bytes(data)
    push.send(Call("module:name", [1]))
    assert inbox.receive() == Call("module:name", [1])
    assert inbox.num_dropped == len(junk)
    for _ in range(200):
        push.send_bytes(b"\xc1")
    push.send(Call("module:name", [2]))
    assert next(inbox.drain(block=True)) == Call("module:name", [2])
    assert inbox.num_dropped == len(junk) + 200
    assert len(caplog.records) == 8
    for _ in range(3):
        push.send_bytes(b"\xc1")
    assert inbox.wait(60)
    assert list(inbox.drain(block=False)) == []


def test_only_the_user_can_open_the_sockets(context: zmq.Context[zmq.Socket[bytes]], addresses: Addresses) -> None:
    """The sockets are files in a folder of mode 0700, and no abstract sockets, which every local user can open."""
    folder = Path(addresses.folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    inbox, push = Pull(context, addresses.api), Push(context, addresses.api)
    push.send(Stop())
    assert inbox.receive() == Stop()
    assert [file.name for file in folder.iterdir()] == ["api"]
    addresses.remove()
    assert not folder.exists()


def test_folder_of_a_killed_server_is_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A new server removes the folders without a lock, and no folder of a running server or of another mode."""
    with tempfile.TemporaryDirectory(prefix="sockets") as base:
        monkeypatch.setattr(tempfile, "tempdir", base)
        make = "import os; from minisgl.message.queue import Addresses; print(Addresses.make(1, 1).folder, flush=True)"
        code = f"{make}; os._exit(9)"
        made = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "TMPDIR": base}
        )
        left = Path(made.stdout.strip())
        assert left.is_dir()
        foreign = Path(base, left.name[:-8] + "open")
        foreign.mkdir(0o755)
        link = Path(base, left.name[:-8] + "link")
        link.symlink_to(tmp_path)
        running = Addresses.make(1, 1)
        new = Addresses.make(1, 1)
        assert not left.exists()
        assert set(os.listdir(base)) == {Path(a.folder).name for a in (running, new)} | {foreign.name, link.name}
        assert tmp_path.exists()
        running.remove()
        new.remove()


def test_long_folder_for_temporary_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The address of a socket fits into the operating system's limit, however long ``TMPDIR`` is."""
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    addresses = Addresses.make(100, 1)
    assert all(len(address.removeprefix("ipc://")) < 104 for address in addresses.tokenizers)
    addresses.remove()

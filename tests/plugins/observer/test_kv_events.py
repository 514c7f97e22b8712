"""KV events: the cache's content rebuilt from the messages, planted bugs, sockets, gaps, restarts and replays.

``docs/examples/kv_events/subscriber.py`` is the subscriber. `test_soak` compares the content in random schedules.
"""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minisgl.cluster import kv_events as messages
from minisgl.cluster.kv_events import BlockStored
from minisgl.config import Config, ConfigError
from minisgl.core import EngineSpec, Req, SamplingParams
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.observer import kv_events
from minisgl.plugins.observer.kv_events import Blocks, KVEvents, Publisher, ReplayBuffer
from minisgl.plugins.observer.kv_events_options import KVEventsConfig
from minisgl.testing.drive import Job, make_plugin
from minisgl.testing.kv_events import KVEventsDrive
from minisgl.testing.planted import ArrivalOrderPolicy
from minisgl.testing.small import no_lookahead
from minisgl.testing.soak import run_all
from minisgl.testing.workloads import jobs, setups

# ---- content: the cache as the events tell it -----------------------------------------------------------


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_workload(data: st.DataObject) -> None:
    setup = data.draw(setups())
    clients = data.draw(jobs(setup))
    spec, cache, policy, options = setup.build()
    KVEventsDrive(spec, cache, policy, **options).run(clients)


def request(uid: int, prompt: Sequence[int], answer: int = 1, arrive: int = 0, salt: str | None = None) -> Job:
    params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True, cache_salt=salt)
    return Job(uid, list(prompt), params, arrive)


def run(clients: Sequence[Job], num_pages: int = 32, page_size: int = 4) -> KVEventsDrive:
    spec = EngineSpec(page_size, num_pages, max_running_requests=4, max_seq_len=page_size * num_pages, vocab_size=200)
    drive = KVEventsDrive(spec, make_plugin("cache", "radix", page_size=page_size), ArrivalOrderPolicy())
    drive.run(clients)
    return drive


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_split_changes_no_block(page_size: int) -> None:
    """The second prompt ends within the first one's edge, the third leaves it there: each block is stored once."""
    first, other = list(range(page_size * 4)), [*range(page_size * 2), *[199] * page_size * 2]
    drive = run([request(1, first), request(2, other, arrive=9), request(3, first, arrive=18)], 64, page_size)
    assert drive.report.cached_tokens > 0
    assert drive.content.stored == len(drive.content.blocks) == drive.cache.total_pages
    assert drive.content.removed == 0


def test_duplicates_are_not_stored() -> None:
    """Two copies of a prompt run at the same time: the pages of the second one are freed, not stored."""
    prompt = list(range(12))
    drive = run([request(1, prompt, 6), request(2, prompt, 6)])
    assert drive.report.counts.admissions == {1: 1, 2: 1}
    assert drive.content.stored == drive.cache.total_pages


def test_a_salt_separates_prompts() -> None:
    """The same prompt without a salt and with two salts has three blocks for each page."""
    prompt = list(range(9))
    drive = run([request(i, prompt, arrive=9 * i, salt=salt) for i, salt in enumerate([None, "a", "b", "a"])])
    assert drive.content.stored == 6
    assert {key.namespace for key in drive.content.prefixes()} == {None, "a", "b"}


def test_a_salt_may_be_any_text() -> None:
    """It may contain a code point that can't be encoded in UTF-8."""
    blocks = Blocks(8, 4, 0)
    req = Req(1, list(range(8)), SamplingParams(cache_salt="a\ud800"), 0)
    pages = np.array([3, 4], np.int32)
    (event,) = blocks.store(req, 0, pages, pages)
    assert isinstance(event, BlockStored)
    assert event.extra_keys is not None
    assert event.extra_keys[0] is not None
    assert msgspec.msgpack.decode(messages.encode([event]))[1][0]["extra_keys"][0][0].startswith("a\ufffd")


def test_evicted_blocks_are_removed() -> None:
    drive = run([request(i, range(i, i + 16), arrive=9 * i) for i in range(8)], num_pages=8)
    assert drive.content.removed > 8


def test_a_retracted_request() -> None:
    """Its pages are stored before it waits again, and it matches them later."""
    with no_lookahead():
        drive = run([request(1, range(8), 20), request(2, range(10, 18), 20)], num_pages=10)
    assert drive.report.retractions > 0
    assert drive.content.stored > 0


def test_a_cache_that_has_pages_in_the_middle() -> None:
    """A cache may find duplicates between the pages that it takes. The events then have a gap for them."""
    blocks, params = Blocks(16, 2, 0), SamplingParams()
    first, other = Req(1, [1, 2, 3, 4], params, 0), Req(2, [1, 2, 3, 4, 5, 6, 7, 8], params, 1)
    blocks.store(first, 0, pages := np.array([0, 1], np.int32), pages)
    blocks.store(other, 0, np.array([0, 1, 2, 3], np.int32), np.array([2, 3], np.int32))
    whole = Blocks(16, 2, 0)
    (event,) = whole.store(other, 0, pages := np.arange(4, dtype=np.int32), pages)
    assert isinstance(event, BlockStored)
    assert blocks._hashes[:4] == event.block_hashes == whole._hashes[:4]
    # New, cached before, new:
    odd = Blocks(16, 2, 0)
    odd._hashes[7] = event.block_hashes[1]
    one, two = odd.store(other, 0, np.array([5, 7, 8, 9], np.int32), np.array([5, 8, 9], np.int32))
    assert isinstance(one, BlockStored)
    assert isinstance(two, BlockStored)
    assert (one.block_hashes, one.token_ids, one.parent_block_hash) == (event.block_hashes[:1], [1, 2], None)
    assert (two.block_hashes, two.token_ids) == (event.block_hashes[2:], [5, 6, 7, 8])
    assert two.parent_block_hash == event.block_hashes[1]


# ---- planted bugs ----------------------------------------------------------------------------------------


def _one_removal_is_skipped() -> Any:
    real = Blocks.remove
    return patch.object(Blocks, "remove", lambda self, pages: real(self, pages[1:]))


def _every_block_is_a_first_one() -> Any:
    real = Blocks._store

    def store(self: Blocks, req: Req, start: int, pages: Any) -> BlockStored:
        event = real(self, req, start, pages)
        event.parent_block_hash = None
        return event

    return patch.object(Blocks, "_store", store)


def _the_parent_is_the_last_stored_block() -> Any:
    real = Blocks._store

    def store(self: Any, req: Req, start: int, pages: Any) -> BlockStored:
        if start:
            self._last[req.uid] = getattr(self, "newest", self._last[req.uid])
        event = real(self, req, start, pages)
        self.newest = event.block_hashes[-1]
        return event

    return patch.object(Blocks, "_store", store)


def _the_match_is_forgotten() -> Any:
    def match(self: Blocks, uid: int, pages: Any) -> None:
        self._last[uid] = self._root

    return patch.object(Blocks, "match", match)


def _the_hash_has_no_salt() -> Any:
    real = messages.block_hashes
    return patch.object(kv_events, "block_hashes", lambda parent, tokens, size, salt=b"": real(parent, tokens, size))


def _the_salt_is_not_published() -> Any:
    real = Blocks._store

    def store(self: Blocks, req: Req, start: int, pages: Any) -> BlockStored:
        event = real(self, req, start, pages)
        event.extra_keys = [None] * len(pages)
        return event

    return patch.object(Blocks, "_store", store)


def _duplicates_are_stored() -> Any:
    real = Blocks.store
    return patch.object(Blocks, "store", lambda self, req, start, cached, new: real(self, req, start, cached, cached))


def _tokens_of_the_next_page() -> Any:
    real = kv_events._tokens
    return patch.object(kv_events, "_tokens", lambda req, start, end: real(req, start + 1, end + 1))


def _the_answer_is_left_out() -> Any:
    return patch.object(kv_events, "_tokens", lambda req, start, end: req.prompt_ids[start:end])


def _a_removal_is_published_late() -> Any:
    real = KVEvents._flush

    def flush(self: Any) -> None:
        late, self.late = getattr(self, "late", []), [e for e in self._events if type(e) is messages.BlockRemoved]
        self._events = [e for e in self._events if e not in self.late] + late
        real(self)

    return patch.object(KVEvents, "_flush", flush)


@pytest.mark.parametrize(
    "bug",
    [
        _one_removal_is_skipped,
        _every_block_is_a_first_one,
        _the_parent_is_the_last_stored_block,
        _the_match_is_forgotten,
        _the_hash_has_no_salt,
        _the_salt_is_not_published,
        _duplicates_are_stored,
        _tokens_of_the_next_page,
        _the_answer_is_left_out,
        _a_removal_is_published_late,
    ],
)
def test_random_schedules_find_each_bug(bug: Callable[[], Any]) -> None:
    with bug():
        assert any(run_all([seed])[1] for seed in range(40))


# ---- sockets -----------------------------------------------------------------------------------------------


FOLDER = Path(__file__).resolve().parents[3] / "docs" / "examples" / "kv_events"


def _example() -> ModuleType:
    """Import docs/examples/kv_events/subscriber.py, whose structs are its own."""
    spec = importlib.util.spec_from_file_location("kv_events_subscriber", FOLDER / "subscriber.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = _example()


def _stored(number: int, tokens: int = 2) -> list[messages.AnyEvent]:
    """Return an event with one block, whose hash is ``number``."""
    return [BlockStored([number], None, [number] * tokens, tokens, None, "GPU", None, [None], 0, "full_attention")]


@contextmanager
def publishing(**options: Any) -> Iterator[Publisher]:
    """Yield a publisher at free ports, or at those of ``options``. Its first message is that of `KVEvents`."""
    options = {"endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*", **options}
    publisher = Publisher(KVEventsConfig(**options))
    try:
        publisher.publish([messages.AllBlocksCleared()])
        yield publisher
    finally:
        publisher.close()


def addresses(publisher: Publisher) -> dict[str, str]:
    """Return the addresses of a publisher, as options of another one and as arguments of a subscriber."""
    assert publisher.replayer is not None
    sockets = {"endpoint": publisher._pub, "replay_endpoint": publisher.replayer._router}
    return {key: socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0") for key, socket in sockets.items()}


@contextmanager
def subscribed(publisher: Publisher, **options: Any) -> Iterator[Any]:
    """Yield a subscriber that has the publisher's messages so far, and gets the next ones."""
    subscriber = example.Subscriber(**{**addresses(publisher), **options})
    try:
        wait(subscriber, lambda: subscriber.last is not None)
        while not live(publisher, subscriber):
            pass
        yield subscriber
    finally:
        subscriber.close()


def live(publisher: Publisher, subscriber: Any) -> bool:
    """Publish an event that changes nothing. Return whether the subscriber gets it."""
    publisher.publish([messages.BlockRemoved([0], "GPU", 0)])
    seq = publisher.messages - 1
    while subscriber.poll(0.2):
        if subscriber.last is not None and subscriber.last[0] == seq:
            return True
    return False


def wait(subscriber: Any, until: Callable[[], bool], seconds: float = 60) -> None:
    """Let the subscriber receive until the condition holds."""
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end, f"the subscriber has {subscriber.last} and {len(subscriber.blocks)} blocks"
        subscriber.poll(0.05)


def test_frames_and_layout() -> None:
    """Topic, 8 bytes of sequence number, MessagePack in vLLM's layout: an array, whose events are maps."""
    with publishing(topic="kv@1") as publisher, zmq.Context.instance().socket(zmq.SUB) as sub:
        sub.subscribe("kv@")
        sub.connect(addresses(publisher)["endpoint"])
        while not sub.poll(50):
            publisher.publish([messages.BlockRemoved([2**64 - 1], "GPU", 0)])
        topic, seq, payload = sub.recv_multipart()
        assert topic == b"kv@1"
        assert 0 < int.from_bytes(seq, "big") < publisher.messages
        ts, events, rank = msgspec.msgpack.decode(payload)
        assert abs(ts - time.time()) < 3600
        removed = {"type": "BlockRemoved", "block_hashes": [2**64 - 1], "medium": "GPU", "group_idx": 0}
        assert (events, rank) == ([removed], 0)
    assert msgspec.msgpack.decode(messages.encode([messages.AllBlocksCleared()]))[1] == [{"type": "AllBlocksCleared"}]
    (stored,) = msgspec.msgpack.decode(messages.encode(_stored(9)))[1]
    assert list(stored) == [
        "type",
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
    ]
    assert example.EventBatch is not messages.EventBatch


def test_the_documented_hash() -> None:
    """A hash that a router may compute itself; the value must never change between releases."""
    root = messages.root_hash(0)
    hashes = messages.block_hashes(root, np.arange(4, dtype=np.int32), 2, b"salt")
    assert (root, hashes) == (6912158355717386040, [5963500328259179070, 4471709797417489679])
    assert messages.block_hashes(hashes[0], np.array([2, 3], np.int32), 2) == hashes[1:]
    assert messages.root_hash(1) != root


def test_the_page_lists_every_field() -> None:
    page = (FOLDER.parents[1] / "operation" / "kv-events.md").read_text("utf-8")
    for kind in (BlockStored, messages.BlockRemoved, messages.AllBlocksCleared):
        named = {kind.__name__, *kind.__struct_fields__}
        assert {name for name in named if f"`{name}`" in page} == named
    for text in ("`page_size`", "kv_events.endpoint", *(f"kv_events.{name}" for name in ("replay_endpoint", "hwm"))):
        assert text in page


def test_the_example_as_a_program() -> None:
    with publishing() as publisher:
        publisher.publish(_stored(1))
        command = [sys.executable, "-u", str(FOLDER / "subscriber.py"), *addresses(publisher).values()]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
            assert program.stdout is not None
            assert "1 blocks, complete" in program.stdout.readline()
            program.kill()


def test_a_late_subscriber_gets_everything() -> None:
    with publishing() as publisher:
        for i in range(1, 100):
            publisher.publish(_stored(i))
        with subscribed(publisher) as subscriber:
            assert subscriber.blocks == set(range(1, 100))
            assert (subscriber.complete, subscriber.restarts) == (True, 0)
            publisher.publish(_stored(100))
            gaps = subscriber.gaps
            wait(subscriber, lambda: 100 in subscriber.blocks)
            assert subscriber.gaps == gaps


def test_a_slow_subscriber_loses_messages_and_gets_them_again() -> None:
    """The sends do not block, and the messages that do not fit into the queues are dropped."""
    with publishing(hwm=1) as publisher, subscribed(publisher, hwm=1) as subscriber:
        for i in range(1, 1001):
            publisher.publish(_stored(i, 20_000))
        publisher.publish([messages.BlockRemoved([1], "GPU", 0)])
        end = publisher.messages - 1
        wait(subscriber, lambda: not subscriber.poll(0.5))
        while subscriber.last[0] < end:
            live(publisher, subscriber)
        assert subscriber.gaps > 0
        assert subscriber.blocks == set(range(2, 1001))
        assert (subscriber.complete, subscriber.restarts) == (True, 0)
        assert publisher.errors == 0


@pytest.mark.parametrize("behind", [-3, 0, 1, 5])
def test_a_restart_is_noticed(behind: int) -> None:
    """Whether the new publisher has sent fewer messages than the old one, as many, or more."""
    with publishing() as publisher:
        where = addresses(publisher)
        for i in range(1, 10):
            publisher.publish(_stored(i))
        subscriber = example.Subscriber(**where)
        wait(subscriber, lambda: len(subscriber.blocks) == 9)
        before = publisher.messages
    with publishing(**where) as publisher:
        for i in range(11, 11 + before - 1 + behind):
            publisher.publish(_stored(i))
        wait(subscriber, lambda: subscriber.restarts == 1)
        assert subscriber.blocks == set(range(11, 11 + before - 1 + behind))
        assert subscriber.complete
        while not live(publisher, subscriber):
            pass
        publisher.publish(_stored(99))
        wait(subscriber, lambda: 99 in subscriber.blocks)
        assert (subscriber.restarts, subscriber.complete) == (1, True)
    subscriber.close()


def test_more_is_lost_than_can_be_replayed() -> None:
    """Then the subscriber knows that blocks may be missing, and has the later ones."""
    with publishing(buffer_steps=5) as publisher:
        for i in range(1, 20):
            publisher.publish(_stored(i))
        with subscribed(publisher) as subscriber:
            assert not subscriber.complete
            assert subscriber.blocks <= set(range(15, 20))
            publisher.publish([messages.AllBlocksCleared()])
            publisher.publish(_stored(20))
            wait(subscriber, lambda: 20 in subscriber.blocks)
            assert subscriber.blocks == {20}


def test_without_a_replay_endpoint() -> None:
    with publishing(replay_endpoint=None) as publisher:
        assert publisher.replayer is None
        endpoint = publisher._pub.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        subscriber = example.Subscriber(endpoint)
        while not live(publisher, subscriber):
            pass
        publisher.publish(_stored(1))
        wait(subscriber, lambda: subscriber.blocks == {1})
        assert not subscriber.complete
        subscriber.close()


def test_a_req_socket_gets_the_first_message() -> None:
    """vLLM's example asks with a REQ socket, which receives one answer for each request."""
    with publishing() as publisher, zmq.Context.instance().socket(zmq.REQ) as req:
        for i in range(1, 4):
            publisher.publish(_stored(i))
        req.set(zmq.LINGER, 0)
        req.connect(addresses(publisher)["replay_endpoint"])
        req.send((2).to_bytes(8, "big"))
        assert req.poll(10_000)
        seq, payload = req.recv_multipart()
        assert int.from_bytes(seq, "big") == 2
        assert msgspec.msgpack.decode(payload)[1][0]["block_hashes"] == [2]
        assert not req.poll(200)


def test_junk_at_the_replay_endpoint() -> None:
    """It is not answered, and the next request is."""
    with publishing() as publisher:
        replay_endpoint = addresses(publisher)["replay_endpoint"]
        with zmq.Context.instance().socket(zmq.DEALER) as dealer:
            dealer.set(zmq.LINGER, 0)
            dealer.connect(replay_endpoint)
            for frames in ([b"x"], [b"", b"1234567"], [b"", b"x" * 9], [b"x", b"12345678"], [b"", b"12345678", b""]):
                dealer.send_multipart(frames)
            dealer.send_multipart([b"", (0).to_bytes(8, "big")])
            assert dealer.poll(10_000)
            assert dealer.recv_multipart()[1] == (0).to_bytes(8, "big")
            assert dealer.recv_multipart()[1:] == [example.END, b""]
            assert not dealer.poll(100)
        with zmq.Context.instance().socket(zmq.DEALER) as dealer:
            dealer.set(zmq.LINGER, 0)
            dealer.connect(replay_endpoint)
            dealer.send_multipart([b"", bytes(1 << 20)])  # too large: the publisher ends the connection
            assert not dealer.poll(100)
        with subscribed(publisher) as subscriber:
            assert subscriber.complete


def test_a_replaying_subscriber_that_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its replay is broken off, then another one's begins; and the end of the publisher waits for neither."""
    monkeypatch.setattr(kv_events, "REPLAY_SECONDS", 0.2)
    with publishing() as publisher:
        for i in range(1, 1501):
            publisher.publish(_stored(i, 20_000))
        with zmq.Context.instance().socket(zmq.DEALER) as dealer:
            dealer.set(zmq.LINGER, 0)
            dealer.set(zmq.RCVHWM, 1)
            dealer.connect(addresses(publisher)["replay_endpoint"])
            dealer.send_multipart([b"", bytes(8)])
            assert dealer.poll(10_000)
            with subscribed(publisher) as subscriber:
                assert len(subscriber.blocks) == 1500
            dealer.send_multipart([b"", bytes(8)])
    assert not replay_threads()


def replay_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kv-events-replay"]


def test_the_buffer_is_bounded() -> None:
    buffer = ReplayBuffer(steps=3, max_bytes=10)
    for seq, payload in enumerate([b"1234", b"12", b"1", b"", b"123456789"]):
        buffer.append(seq, payload)
    assert buffer.since(0) == [(2, b"1"), (3, b""), (4, b"123456789")]
    buffer.append(5, bytes(100))  # a single message may be larger
    assert buffer.since(0) == [(5, bytes(100))]
    buffer.append(6, b"1")
    assert buffer.since(6) == buffer.since(0) == [(6, b"1")]


# ---- start and end ----------------------------------------------------------------------------------------


def test_no_observer_without_the_option() -> None:
    spec = EngineSpec(4, 8, max_running_requests=4, max_seq_len=32, vocab_size=50)
    assert kv_events.minisgl_observer(Config(), spec) is None


def test_an_address_that_is_taken_is_an_error() -> None:
    spec = EngineSpec(4, 8, max_running_requests=4, max_seq_len=32, vocab_size=50)
    with publishing() as publisher:
        where = addresses(publisher)
        for key, address in where.items():
            free = {"endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*", key: address}
            with pytest.raises(ConfigError, match=rf"kv_events\.{key}=tcp://127.*Address already in use"):
                kv_events.minisgl_observer(Config(kv_events=KVEventsConfig(**free)), spec)
    with publishing(**where):  # the addresses are free again, also those of the publishers that failed
        pass
    assert not replay_threads()


@pytest.mark.parametrize("address", ["tcp://nosuchinterface:5557", "tcp://8.8.8.8:5557", "ipc:///no/such/folder/kv"])
def test_an_address_of_another_machine_is_an_error(address: str) -> None:
    config = Config(kv_events=KVEventsConfig(endpoint=address))
    config.check()
    with pytest.raises(ConfigError, match=r"kv_events\.endpoint=(tcp|ipc)://.* Use an address of this machine"):
        Publisher(config.kv_events)


@pytest.mark.parametrize(
    "address",
    [
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:99999",
        "tcp://:5557",
        "127.0.0.1:5557",
        "udp://a:1",
        "ipc://kv",
        "tcp://a:b",
        "",
    ],
)
def test_a_bad_address_is_an_error(address: str) -> None:
    """ZeroMQ would listen at port 34463 instead of 99999."""
    for options in ({"endpoint": address}, {"endpoint": "tcp://*:1", "replay_endpoint": address}):
        with pytest.raises(ConfigError, match=r"kv_events.* must be an address such as tcp://127.0.0.1:5557"):
            Config(kv_events=KVEventsConfig(**options)).check()


def test_other_wrong_options() -> None:
    for name, value in {"buffer_steps": 0, "hwm": -1, "hash_seed": 2**63}.items():
        with pytest.raises(ConfigError, match=f"kv_events.{name} must be"):
            Config(kv_events=KVEventsConfig(**{"endpoint": "tcp://*:1", name: value})).check()
    with pytest.raises(ConfigError, match=r"must be used with kv_events\.endpoint"):
        Config(kv_events=KVEventsConfig(replay_endpoint="tcp://*:1")).check()


def test_ipc(tmp_path: Path) -> None:
    """A socket that is in use, and a file that is no socket, are not deleted; what a killed server left behind is."""
    path = tmp_path / "kv"
    where = {"endpoint": f"ipc://{path}", "replay_endpoint": f"ipc://{tmp_path}/replay"}
    with publishing(**where) as publisher:
        with pytest.raises(ConfigError, match="another program listens there"):
            Publisher(KVEventsConfig(endpoint=f"ipc://{path}"))
        with subscribed(publisher) as subscriber:
            assert subscriber.complete
    with socket.socket(socket.AF_UNIX) as left_behind:
        path.unlink(missing_ok=True)
        left_behind.bind(str(path))
    with publishing(**where):
        pass
    path.unlink(missing_ok=True)
    path.write_text("mine")
    with pytest.raises(ConfigError, match="no socket"):
        Publisher(KVEventsConfig(endpoint=f"ipc://{path}"))
    assert path.read_text() == "mine"


def test_an_error_is_counted_and_logged_rarely(caplog: pytest.LogCaptureFixture) -> None:
    """It does not reach the scheduler, and the sequence number is used up, so that a subscriber notices."""
    caplog.set_level(logging.ERROR)
    with publishing() as publisher, subscribed(publisher) as subscriber:
        for _ in range(3):
            publisher.publish([object()])  # type: ignore[list-item]
        assert publisher.errors == 3
        assert len(caplog.records) == 1
        gaps = subscriber.gaps
        publisher.publish(_stored(1))
        wait(subscriber, lambda: 1 in subscriber.blocks)
        assert (subscriber.gaps, subscriber.complete) == (gaps + 1, False)


def test_an_observer_that_is_not_closed_ends() -> None:
    """Its sockets and its thread end when it is deleted."""
    spec = EngineSpec(4, 8, max_running_requests=4, max_seq_len=32, vocab_size=50)
    options = KVEventsConfig(endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*")
    observer = kv_events.minisgl_observer(Config(kv_events=options), spec)
    assert observer is not None
    where, context = addresses(observer._publisher), observer._publisher._context
    assert replay_threads()
    del observer
    gc.collect()
    assert not replay_threads()
    assert context.closed
    with publishing(**where):
        pass


def test_close_in_a_forked_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with publishing() as publisher:
        pid = os.getpid()
        monkeypatch.setattr(os, "getpid", lambda: pid + 1)
        publisher.close()
        monkeypatch.undo()
        with subscribed(publisher) as subscriber:
            assert subscriber.complete


def test_metrics_and_close() -> None:
    """The observer of a plugin manager, from its first message to its last."""
    manager = PluginManager.load(light=True)
    spec = EngineSpec(4, 8, max_running_requests=4, max_seq_len=32, vocab_size=50)
    options = KVEventsConfig(endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*")
    manager.observe(Config(kv_events=options), spec)
    (observer,) = [p for p in manager._manager.get_plugins() if type(p) is KVEvents]
    pages = np.array([3, 5], np.int32)
    with subscribed(observer._publisher) as subscriber:
        manager.hook.minisgl_pages_cached(
            step=0, req=Req(1, range(8), SamplingParams(), 0), pages=pages, start=0, cached_pages=pages
        )
        manager.hook.minisgl_pages_evicted(step=0, pages=pages[1:])
        text = "".join(manager.hook.minisgl_metrics())
        counts = {line.split()[0]: int(line.split()[1]) for line in text.splitlines() if line.startswith("minisgl_kv_")}
        assert counts.pop("minisgl_kv_events_messages_total") >= 1
        assert counts.pop("minisgl_kv_events_replays_total") >= 1
        assert counts == {
            "minisgl_kv_events_stored_blocks_total": 2,
            "minisgl_kv_events_removed_blocks_total": 1,
            "minisgl_kv_events_errors_total": 0,
        }
        manager.close()  # the last events were not published yet
        wait(subscriber, lambda: len(subscriber.blocks) == 1)
    assert observer._publisher._context.closed
    manager.close()

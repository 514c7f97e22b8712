"""The subscriber: the router's view of a cache, from messages that may be lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from minisgl.cluster.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from minisgl.cluster.kv_subscriber import KVSubscriber
from minisgl.cluster.routing import Replica
from minisgl.plugins.observer.kv_events import Publisher
from minisgl.plugins.observer.kv_events_options import KVEventsConfig

Run = Callable[[Awaitable[None]], None]
Until = Callable[..., Awaitable[None]]


class Source:
    """A publisher of events, as a server has one."""

    def __init__(self, folder: Path, buffer_steps: int):
        self.endpoint, self.replay_endpoint = f"ipc://{folder}/kv", f"ipc://{folder}/replay"
        self.publisher = Publisher(
            KVEventsConfig(endpoint=self.endpoint, replay_endpoint=self.replay_endpoint, buffer_steps=buffer_steps)
        )
        self.publisher.publish([AllBlocksCleared()])

    def store(self, *blocks: int) -> None:
        tokens = [0] * 16 * len(blocks)
        self.publisher.publish([BlockStored(list(blocks), None, tokens, 16, None, "GPU", None)])

    def remove(self, *blocks: int) -> None:
        self.publisher.publish([BlockRemoved(list(blocks), "GPU")])

    def lose(self, publish: Callable[[], None]) -> None:
        """Publish a message that no subscriber receives, but that can be replayed."""
        socket, self.publisher._pub = self.publisher._pub, self.publisher._context.socket(1)  # PUB without subscribers
        publish()
        self.publisher._pub.close()
        self.publisher._pub = socket


@pytest.fixture
def sources(tmp_path: Path) -> Iterator[Callable[..., Source]]:
    made = []

    def make(buffer_steps: int = 1000) -> Source:
        made.append(Source(tmp_path, buffer_steps))
        return made[-1]

    yield make
    for source in made:
        source.publisher.close()


def test_messages_from_before_the_connection(run: Run, until: Until, sources: Callable[..., Source]) -> None:
    async def body() -> None:
        source, replica = sources(), Replica(16)
        source.store(1, 2, 3)
        source.remove(2)
        subscriber = KVSubscriber(source.endpoint, source.replay_endpoint, replica.apply)
        await until(lambda: replica.blocks == {1, 3})
        source.store(4)
        source.remove(1)
        await until(lambda: replica.blocks == {3, 4})
        assert (subscriber.gaps, subscriber.replays) == (0, 1)
        await subscriber.close()
        source.store(5)
        await asyncio.sleep(0.05)
        assert replica.blocks == {3, 4}

    run(body())


def test_lost_messages_are_replayed(run: Run, until: Until, sources: Callable[..., Source]) -> None:
    async def body() -> None:
        source, replica = sources(), Replica(16)
        subscriber = KVSubscriber(source.endpoint, source.replay_endpoint, replica.apply)
        source.store(1, 2)
        await until(lambda: subscriber.next == 2)
        source.lose(lambda: source.remove(1))
        source.lose(lambda: source.store(3))
        source.store(4)
        await until(lambda: subscriber.next == 5)
        assert replica.blocks == {2, 3, 4}
        assert (subscriber.gaps, subscriber.replays) == (0, 2)
        await subscriber.close()

    run(body())


def test_messages_that_can_not_be_replayed(run: Run, until: Until, sources: Callable[..., Source]) -> None:
    """The view forgets all blocks: one of them may have been removed."""

    async def body() -> None:
        source, replica = sources(buffer_steps=1), Replica(16)
        subscriber = KVSubscriber(source.endpoint, source.replay_endpoint, replica.apply)
        await until(lambda: subscriber.next == 1)
        source.store(1, 2)
        await until(lambda: subscriber.next == 2)
        source.lose(lambda: source.remove(1))
        source.store(3)
        await until(lambda: subscriber.next == 4)
        assert replica.blocks == {3}
        assert subscriber.gaps == 1
        await subscriber.close()

    run(body())


def test_a_burst(run: Run, until: Until, sources: Callable[..., Source]) -> None:
    async def body() -> None:
        source, replica = sources(), Replica(16)
        subscriber = KVSubscriber(source.endpoint, source.replay_endpoint, replica.apply)
        for block in range(500):
            source.store(block)
            if block % 100 == 0:
                await asyncio.sleep(0.02)
        await until(lambda: replica.blocks == set(range(500)))
        assert subscriber.gaps == 0
        await subscriber.close()

    run(body())

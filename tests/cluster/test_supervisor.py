"""The supervisor: dead, hung and crashing replicas are started again, and nothing of them is left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from minisgl.cluster import supervisor
from minisgl.cluster.replica_process import ReplicaProcess
from minisgl.cluster.status import ClusterStatus, ReplicaStatus
from minisgl.cluster.supervisor import ReplicaError, Supervisor

Run = Callable[[Awaitable[None]], None]
Until = Callable[..., Awaitable[None]]


@dataclass
class Options:
    restart_limit: int = 3
    start_timeout: float = 30.0
    health_timeout: float = 30.0


@dataclass
class FakeRouter:
    """Records the calls of the supervisor."""

    added: dict[int, str] = field(default_factory=dict)
    calls: list[tuple[str, int]] = field(default_factory=list)
    healthy: dict[int, bool] = field(default_factory=dict)
    status_url: str = ""

    async def add(self, index: int, url: str) -> None:
        self.added[index] = url
        self.calls.append(("add", index))

    async def remove(self, index: int) -> None:
        self.added.pop(index, None)
        self.calls.append(("remove", index))

    def set_healthy(self, index: int, healthy: bool) -> None:
        self.healthy[index] = healthy


@pytest.fixture
def soon_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "UNHEALTHY_SECONDS", 2.0)


class Fixture:
    """A supervisor of fake servers, whose behaviour is in the file ``script``, read at each start."""

    def __init__(self, command: list[str], folder: Path, count: int, options: Options):
        self.router = FakeRouter()
        self.status = ClusterStatus([ReplicaStatus(index) for index in range(count)])
        self.starts: list[ReplicaProcess] = []
        self._command, self._script = command, folder / "script.json"
        self.script()
        self.supervisor = Supervisor(self._start, self.router, self.status, options, backoff=0.05)  # type: ignore[arg-type]

    def script(self, **script: object) -> None:
        self._script.write_text(json.dumps(script))

    async def _start(self, index: int) -> ReplicaProcess:
        words = [*self._command, f"test.script={self._script}"]
        self.starts.append(await ReplicaProcess.start(f"replica-{index}", words, {}))
        return self.starts[-1]

    def states(self) -> list[str]:
        return [replica.state for replica in self.status.replicas]


@pytest.fixture
def cluster(fake_command: list[str], tmp_path: Path) -> Callable[..., Fixture]:
    """Return a function that makes a supervisor with ``count`` replicas."""

    def make(count: int = 1, **options: float) -> Fixture:
        return Fixture(fake_command, tmp_path, count, Options(**options))  # type: ignore[arg-type]

    return make


def test_a_killed_replica_is_started_again(
    cluster: Callable[..., Fixture], run: Run, until: Until, leftovers: Callable[[], list[str]]
) -> None:
    """The router forgets it first, its other processes are gone before the next start, and the others go on."""

    async def body() -> None:
        fake = cluster(2)
        fake.script(child=True)
        running = asyncio.create_task(fake.supervisor.run())
        await fake.supervisor.wait_until_started()
        assert fake.states() == ["ready", "ready"]
        assert len(leftovers()) == 4
        first = dict(fake.router.added)
        os.kill(fake.status.replicas[0].pid, signal.SIGKILL)
        await until(lambda: len(fake.starts) == 3)
        await until(lambda: fake.states() == ["ready", "ready"])
        assert len(leftovers()) == 4
        assert fake.router.calls[2:] == [("remove", 0), ("add", 0)]
        assert fake.router.added[0] != first[0] and fake.router.added[1] == first[1]
        assert [replica.restarts for replica in fake.status.replicas] == [1, 0]
        await fake.supervisor.end()
        await running
        assert leftovers() == []
        assert fake.states() == ["stopped", "stopped"]

    run(body())


@pytest.mark.usefixtures("soon_unhealthy")
def test_a_hung_replica_is_dead(
    cluster: Callable[..., Fixture], run: Run, until: Until, leftovers: Callable[[], list[str]]
) -> None:
    """It gets no new requests, then it is killed and started again."""

    async def body() -> None:
        fake = cluster(health_timeout=5.0)
        running = asyncio.create_task(fake.supervisor.run())
        await fake.supervisor.wait_until_started()
        os.kill(fake.status.replicas[0].pid, signal.SIGSTOP)
        await until(lambda: fake.router.healthy == {0: False})
        assert fake.states() == ["unhealthy"]
        await until(lambda: len(fake.starts) == 2 and fake.states() == ["ready"])
        await fake.supervisor.end()
        await running
        assert leftovers() == []

    run(body())


@pytest.mark.usefixtures("soon_unhealthy")
def test_a_replica_is_healthy_again(cluster: Callable[..., Fixture], run: Run, until: Until) -> None:
    async def body() -> None:
        fake = cluster(health_timeout=60.0)
        running = asyncio.create_task(fake.supervisor.run())
        await fake.supervisor.wait_until_started()
        os.kill(fake.status.replicas[0].pid, signal.SIGSTOP)
        await until(lambda: fake.router.healthy == {0: False})
        os.kill(fake.status.replicas[0].pid, signal.SIGCONT)
        await until(lambda: fake.router.healthy == {0: True})
        assert fake.states() == ["ready"]
        assert len(fake.starts) == 1
        await fake.supervisor.end()
        await running

    run(body())


def test_crash_loop(cluster: Callable[..., Fixture], run: Run, until: Until) -> None:
    """A replica that dies again and again is given up. The cluster goes on with the others until none is left."""

    async def body() -> None:
        fake = cluster(2, restart_limit=2)
        running = asyncio.create_task(fake.supervisor.run())
        await fake.supervisor.wait_until_started()
        fake.script(exit=3)
        os.kill(fake.status.replicas[1].pid, signal.SIGKILL)
        await until(lambda: fake.states() == ["ready", "given up"])
        assert len(fake.starts) == 3
        os.kill(fake.status.replicas[0].pid, signal.SIGKILL)
        with pytest.raises(ReplicaError, match=r"(?s)No replica is left.*status 3.*the script says so") as caught:
            await running
        assert not caught.value.options
        await fake.supervisor.end()

    run(body())


def test_a_start_that_the_system_refuses(
    cluster: Callable[..., Fixture], run: Run, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other replicas go on, and the start is tried again. At the first start it ends the cluster."""
    monkeypatch.setattr(supervisor, "MAX_BACKOFF_SECONDS", 0.05)
    start, refused = ReplicaProcess.start, 0

    async def refuse(*arguments: object, **more: object) -> ReplicaProcess:
        nonlocal refused
        refused += 1
        if refused <= 2:
            raise OSError("no memory")
        return await start(*arguments, **more)  # type: ignore[arg-type]

    async def body() -> None:
        nonlocal refused
        fake = cluster(2)
        running = asyncio.create_task(fake.supervisor.run())
        await fake.supervisor.wait_until_started()
        monkeypatch.setattr(ReplicaProcess, "start", refuse)
        os.kill(fake.status.replicas[1].pid, signal.SIGKILL)
        await until(lambda: refused == 3 and fake.states() == ["ready", "ready"])
        await fake.supervisor.end()
        await running
        refused = 0
        with pytest.raises(ReplicaError, match="can't be started: no memory"):
            await cluster(1).supervisor.run()

    run(body())


def test_wrong_options(cluster: Callable[..., Fixture], run: Run) -> None:
    """A replica that refuses its options at its first start ends the cluster, with the replica's message."""

    async def body() -> None:
        fake = cluster(2)
        fake.script(exit=2)
        with pytest.raises(ReplicaError, match=r"^minisgl: the script says so$") as caught:
            await fake.supervisor.run()
        assert caught.value.options
        await fake.supervisor.end()

    run(body())


def test_a_start_that_takes_too_long(
    cluster: Callable[..., Fixture], run: Run, leftovers: Callable[[], list[str]]
) -> None:
    async def body() -> None:
        fake = cluster(restart_limit=1, start_timeout=0.5)
        fake.script(never_ready=True)
        with pytest.raises(ReplicaError, match=r"did not start within 0\.5 s"):
            await fake.supervisor.run()
        await fake.supervisor.end()
        assert leftovers() == []

    run(body())


def test_end_while_replicas_start(
    cluster: Callable[..., Fixture], run: Run, until: Until, leftovers: Callable[[], list[str]]
) -> None:
    async def body() -> None:
        fake = cluster(2)
        fake.script(never_ready=True)
        running = asyncio.create_task(fake.supervisor.run())
        await until(lambda: len(fake.starts) == 2)
        await fake.supervisor.end()
        await running
        assert leftovers() == []

    run(body())

"""Starts ``torchrun … -m minisgl`` for tests: several groups of processes on this machine, as on several nodes."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import psutil

from minisgl.cluster.process import free_port
from minisgl.testing.serving import patient_timeout

__all__ = ["Nodes"]


class Nodes:
    """A server whose ranks ``count`` torchrun commands start, with ``per_node`` ranks each; a context manager.

    - ``options``: options as on the command line. They are the same on all nodes.
    - ``own_options``: further options of single nodes, by number.
    - ``torchrun``: further options of torchrun.
    - ``prefixes``: commands in front of torchrun, one for each node, such as ``["ip", "netns", "exec", "a"]``.
    - ``master``: the address at which torchrun on node 0 listens.
    - ``program``: what torchrun starts, by default ``-m minisgl``.
    - ``wait``: wait until the server is ready.
    """

    def __init__(
        self,
        *options: str,
        count: int = 2,
        per_node: int = 1,
        own_options: Mapping[int, Sequence[str]] | None = None,
        torchrun: Sequence[str] = (),
        prefixes: Sequence[Sequence[str]] = (),
        master: str = "127.0.0.1",
        interface: str = "lo",
        program: Sequence[str] = ("-m", "minisgl"),
        env: Mapping[str, str] | None = None,
        wait: bool = True,
    ):
        self.folder = Path(tempfile.mkdtemp(prefix="minisgl-test-"))
        self.secret = self.folder / "secret"
        self.secret.write_text(os.urandom(32).hex())
        self.secret.chmod(0o600)
        self.temporary = self.folder / "tmp"
        self.temporary.mkdir()
        port = str(free_port())
        words = [f"multi_node.secret_file={self.secret}", f"multi_node.interface={interface}", *options]
        self.agents: list[subprocess.Popen[bytes]] = []
        self.known: dict[int, psutil.Process] = {}  # all processes that `record` has seen, by process id
        for node in range(count):
            command = [*(prefixes[node] if prefixes else ()), sys.executable, "-m", "torch.distributed.run"]
            command += ["--nnodes", str(count), "--nproc-per-node", str(per_node), "--node-rank", str(node)]
            command += ["--master-addr", master, "--master-port", port, *torchrun, *program]
            command += ["device=cpu", "server.port=0", *words, *(own_options or {}).get(node, ())]
            with self._output(node, "out").open("wb") as out, self._output(node, "err").open("wb") as err:
                self.agents.append(
                    subprocess.Popen(
                        command,
                        stdout=out,
                        stderr=err,
                        start_new_session=True,
                        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.temporary), **(env or {})},
                    )
                )
        self.url = ""
        if wait:
            try:
                self.wait_until_ready()
            except BaseException:
                self.close()
                raise

    def _output(self, node: int, kind: str) -> Path:
        return self.folder / f"{kind}-{node}"

    def output(self, node: int) -> str:
        """Return what a node has printed on standard output so far."""
        return self._output(node, "out").read_text()

    def log(self, node: int | None = None) -> str:
        """Return what a node has printed on standard error so far, or what all nodes have."""
        nodes = range(len(self.agents)) if node is None else [node]
        return "\n".join(self._output(number, "err").read_text() for number in nodes)

    def wait_until_ready(self, timeout: float = 90.0) -> None:
        """Wait until node 0 prints the URL. Raise RuntimeError if a node ends first, or after ``timeout`` seconds."""
        deadline = time.monotonic() + patient_timeout(timeout)
        while (ready := re.search(r"minisgl is ready: (http://\S+)\n", self.output(0))) is None:
            if time.monotonic() > deadline or any(agent.poll() is not None for agent in self.agents):
                raise RuntimeError(f"the nodes did not start:\n{self.log()}")
            time.sleep(0.05)
        self.url = ready[1]
        self.record()

    def record(self) -> None:
        """Record all processes of all nodes, for `alive` and `close`."""
        for agent in self.agents:
            with contextlib.suppress(psutil.NoSuchProcess):
                root = psutil.Process(agent.pid)
                for process in [root, *root.children(recursive=True)]:
                    self.known.setdefault(process.pid, process)

    def rank(self, node: int, local_rank: int = 0) -> psutil.Process:
        """Return a process that torchrun has started: on rank 0, the launcher with the HTTP server."""
        for child in psutil.Process(self.agents[node].pid).children(recursive=True):
            parent = child.parent()
            outer = {} if parent is None else parent.environ()
            if child.environ().get("LOCAL_RANK") == str(local_rank) and "LOCAL_RANK" not in outer:
                return child
        raise RuntimeError(f"node {node} has no rank {local_rank}")

    def scheduler(self) -> psutil.Process:
        """Return rank 0's process with the scheduler and the engine."""
        for child in self.rank(0).children():
            if child.name() == "scheduler-0":
                return child
        raise RuntimeError("rank 0 has no scheduler")

    def alive(self) -> list[psutil.Process]:
        """Return the recorded processes that still run."""

        def runs(process: psutil.Process) -> bool:
            with contextlib.suppress(psutil.NoSuchProcess):
                return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
            return False

        for agent in self.agents:
            agent.poll()
        return [process for process in self.known.values() if runs(process)]

    def seconds_until_gone(self, limit: float = 60.0, but: Sequence[psutil.Process] = ()) -> float:
        """Wait until no recorded process except ``but`` runs, and return the seconds.

        Raise AssertionError after ``limit`` seconds.
        """
        began = time.monotonic()
        while left := [process for process in self.alive() if process not in but]:
            if time.monotonic() - began > patient_timeout(limit):
                raise AssertionError(f"these processes still run: {left}\n{self.log()}")
            time.sleep(0.02)
        return time.monotonic() - began

    def leftovers(self) -> list[str]:
        """Return the recorded processes that still run, and the files that the server left."""
        return [*map(str, self.alive()), *(str(p) for p in self.temporary.iterdir() if p.name.startswith("minisgl"))]

    def statuses(self) -> list[int]:
        """Wait for the torchrun commands and return their exit statuses."""
        return [agent.wait(patient_timeout(60)) for agent in self.agents]

    def terminate(self) -> None:
        """Send SIGTERM to the torchrun commands of all nodes."""
        for agent in self.agents:
            agent.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """Kill all processes, and delete all files."""
        self.record()
        for process in self.known.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()  # psutil does not kill a new process that reuses the process id
        for agent in self.agents:
            agent.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Nodes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

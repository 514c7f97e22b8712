"""An engine with all its ranks, for a program whose own process is rank 0: ``LLM`` and the benchmarks.

The other ranks are child processes that run this module (``python -m minisgl.engine.followers``), so they import
nothing from the caller's ``__main__``. Each child reads its config and then its steps from its standard input: a pipe
loses no data, and reaches end-of-file when rank 0's process ends. The server starts its rank processes differently
(`minisgl.server.launcher`) and does not use this module.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, BinaryIO

import torch

from minisgl.core import EngineDeadError, EngineSpec, Step, StepResult, TokenMasks
from minisgl.engine.build import LeaderEngine, build_engine, follow
from minisgl.plugin_manager.manager import PluginManager, decode_config, encode_config, plugins_of
from minisgl.utils.log import setup_logging
from minisgl.utils.ports import free_port

if TYPE_CHECKING:
    from minisgl.config import Config
    from minisgl.engine.engine import TorchEngine

log = logging.getLogger(__name__)

_LENGTH = struct.Struct("<Q")
GRACE = 5.0
"""Seconds that follower processes have to exit after their standard input is closed. After that they are killed."""
RESULT_POLL_SECONDS = 2e-5
"""Seconds between two queries of the device while `RankedEngine.result` waits."""
PROCESS_POLL_SECONDS = 0.1
"""Seconds between two checks that the other processes (followers, or a follower's parent) still run."""


def start_engine(config: Config, manager: PluginManager) -> TorchEngine | RankedEngine:
    """Build rank 0's engine in this process and start ``config.tp - 1`` follower processes.

    Closing the returned engine ends the followers. Raises `ConfigError` for options that do not fit, and
    `EngineDeadError` if a follower exits during start.
    """
    if config.tp == 1:
        return build_engine(config, manager)
    address = f"127.0.0.1:{free_port()}"
    threads = torch.get_num_threads()
    followers = Followers(encode_config(config, manager), config.tp, address)
    try:
        engine = followers.watch(lambda: build_engine(config, manager, 0, config.tp, address))
    except BaseException:
        followers.close(wait=0.0)
        torch.set_num_threads(threads)
        raise
    return RankedEngine(engine, followers, threads)


class RankedEngine:
    """Rank 0's engine together with the follower processes.

    ``threads`` is torch's thread count before the engine was built; `close` sets torch back to this count.
    """

    def __init__(self, engine: TorchEngine, followers: Followers, threads: int):
        self._engine, self._leader, self._followers = engine, LeaderEngine(engine, followers.send), followers
        self._threads = threads
        self._dead = self._closed = False
        self.spec: EngineSpec = engine.spec
        self.eos_ids: frozenset[int] = engine.eos_ids
        self.device, self.dtype = engine.device, engine.dtype

    @property
    def leader(self) -> TorchEngine:
        """Rank 0's engine itself. Steps must not be launched on it, because the other ranks would not get them."""
        return self._engine

    def launch(self, step: Step) -> None:
        """Send the step to the followers and launch it on rank 0. Raises `EngineDeadError` if a rank has failed."""
        with self._watching():
            self._leader.launch(step)

    def sample(self, masks: TokenMasks) -> None:
        """Start the sampling of a step with ``late_sampling``. Raises `EngineDeadError` if rank 0's engine failed."""
        with self._watching():
            self._leader.sample(masks)

    def result(self) -> StepResult:
        """Wait for the oldest step in flight and return its tokens.

        Raises `EngineDeadError` if a follower process exits before the result is ready: rank 0's GPU would wait for
        that rank without end.
        """
        with self._watching():
            next_check = time.monotonic() + PROCESS_POLL_SECONDS
            while not self._engine.result_ready():
                time.sleep(RESULT_POLL_SECONDS)
                if (now := time.monotonic()) >= next_check:
                    next_check = now + PROCESS_POLL_SECONDS
                    if exited := self._followers.exited():
                        raise EngineDeadError(f"{exited}; its own error message, if any, is above")
            return self._leader.result()

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """Record that the engine is dead if the body raises an exception.

        After an `EngineDeadError`, the failed rank's process may not have exited yet, so `exited` may not list it.
        After any other exception, such as KeyboardInterrupt, a step may have reached some ranks only.
        """
        try:
            yield
        except BaseException:
            self._dead = True
            raise

    def close(self) -> None:
        """End the followers and close rank 0's engine. A second call does nothing, or ends what an exception left.

        If a rank failed while computing on GPUs, or a step was broken off, rank 0's engine is abandoned instead of
        closed: its GPU memory is released only when this process exits.
        """
        if self._closed:
            return
        failed = self._dead or bool(self._followers.exited())
        self._followers.end_input()
        try:
            if failed and self.device.type == "cuda":
                self._engine.abandon()
            else:
                self._leader.close()
        finally:
            self._followers.close(wait=0.0 if failed else GRACE)
            torch.set_num_threads(self._threads)
            self._closed = True


class Followers:
    """The processes of ranks 1 to ``size - 1``. ``config`` is the encoded config, which is sent to each of them."""

    def __init__(self, config: bytes, size: int, address: str):
        command = [sys.executable, "-m", "minisgl.engine.followers", "--size", str(size), "--address", address]
        command += ["--parent", str(os.getpid())]
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(1, size):
                process = subprocess.Popen([*command, "--rank", str(rank)], stdin=subprocess.PIPE)
                self._processes.append(process)
            self.send(config)
        except BaseException:
            self.close(wait=0.0)
            raise

    def send(self, data: bytes) -> None:
        """Write the length and the bytes to every follower's pipe. Raises `EngineDeadError` if a pipe is closed."""
        for rank, process in enumerate(self._processes, 1):
            assert process.stdin is not None
            try:
                process.stdin.write(_LENGTH.pack(len(data)) + data)
                process.stdin.flush()
            except OSError as error:
                raise EngineDeadError(f"rank {rank} is gone ({self.exited() or error})") from error

    def watch(self, start: Callable[[], TorchEngine]) -> TorchEngine:
        """Run ``start``, which waits for the followers, and return its result.

        Raises `EngineDeadError` if a follower exits before ``start`` returns, and any error that ``start`` raises.
        The rendezvous of the ranks has no way to report that a rank will not connect, so ``start`` runs in a daemon
        thread that the caller can abandon.
        """
        done: list[TorchEngine] = []
        failed: list[BaseException] = []

        def run() -> None:
            try:
                done.append(start())
            except BaseException as error:  # re-raised below in the caller's thread
                failed.append(error)

        thread = threading.Thread(target=run, name="minisgl-rank-0-start", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(0.05)
            if thread.is_alive() and (exited := self.exited()):
                thread.join(1.0)  # rank 0 may be about to raise the same error with a better message
                if thread.is_alive():
                    raise EngineDeadError(f"while starting, {exited}; its own error message is above")
        if failed:
            raise failed[0]
        return done[0]

    def end_input(self) -> None:
        """Close the followers' standard input: end-of-file tells them that there are no more steps."""
        for process in self._processes:
            if process.stdin is not None:
                with contextlib.suppress(OSError):  # the process has exited already
                    process.stdin.close()

    def close(self, wait: float = GRACE) -> None:
        """Close the followers' input, wait up to ``wait`` seconds for their exit, and kill those that still run."""
        self.end_input()
        deadline = time.monotonic() + wait
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            if process.poll() is None:
                process.kill()
                process.wait()

    def exited(self) -> str:
        """Return which followers have exited, with their exit status, as text. Return "" if all of them run."""
        exited = [(rank, p.returncode) for rank, p in enumerate(self._processes, 1) if p.poll() is not None]
        return ", ".join(f"rank {rank} ended with status {status}" for rank, status in exited)


def _message_reader(stream: BinaryIO) -> Callable[[], bytes | None]:
    """Return a function that reads the next message of `Followers.send` from ``stream``, or None at end-of-file."""

    def read() -> bytes | None:
        header = stream.read(_LENGTH.size)
        if len(header) < _LENGTH.size:
            return None
        size = _LENGTH.unpack(header)[0]
        data = stream.read(size)
        return data if len(data) == size else None

    return read


def main(argv: Sequence[str] | None = None) -> None:
    """Run one follower: read the config, build the engine, replay steps until standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m minisgl.engine.followers")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--parent", type=int, required=True)
    args = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by rank 0, which closes this standard input
    threading.Thread(target=_exit_with_parent, args=(args.parent,), name="parent-watch", daemon=True).start()
    read = _message_reader(sys.stdin.buffer)
    data = read()
    if data is None:
        return
    try:
        manager = PluginManager.load(plugins_of(data))
        config = decode_config(data, manager)
        setup_logging(config.log_level, config.log_format, f"rank-{args.rank}")
        engine = build_engine(config, manager, args.rank, args.size, args.address)
        follow(engine, read)
    except BaseException:
        log.critical("rank %d failed", args.rank, exc_info=True)
        sys.stderr.flush()
        os._exit(1)  # no clean shutdown: closing the engine could wait for another rank that has exited
    engine.close()


def _exit_with_parent(parent: int) -> None:
    """Exit this process when the process with id ``parent`` has exited, even if the main thread waits for a device."""
    while os.getppid() == parent:
        time.sleep(PROCESS_POLL_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    main()

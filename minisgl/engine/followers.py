"""An engine with all its ranks, for a program that is rank 0 itself: ``LLM`` and the benchmarks.

The other ranks are child processes of their own program (``python -m minisgl.engine.followers``), so that nothing is
imported from the caller's ``__main__``. Each reads its config and then its steps from its standard input: a pipe loses
nothing, and ends when rank 0 does. The server has processes and a launcher of its own and does not use this.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, BinaryIO

import torch

from minisgl.core import EngineDeadError, EngineSpec, Step, StepResult
from minisgl.engine.build import LeaderEngine, build_engine, follow
from minisgl.plugin_manager.manager import PluginManager, decode_config, encode_config, plugins_of
from minisgl.utils.ports import free_port

if TYPE_CHECKING:
    from minisgl.config import Config
    from minisgl.engine.engine import TorchEngine

_LENGTH = struct.Struct("<Q")
GRACE = 5.0
"""Seconds that followers have to end when their input has."""
POLL, LOOK = 2e-5, 0.1
"""Seconds between two looks at the device while a result is due, and between two at the other processes."""


def start_engine(config: Config, manager: PluginManager) -> TorchEngine | RankedEngine:
    """Rank 0's engine in this process, and ``config.tp - 1`` followers beside it. Close it to end them."""
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
    """Rank 0's engine together with the processes that follow it. Gives the caller its ``threads`` back at the end."""

    def __init__(self, engine: TorchEngine, followers: Followers, threads: int):
        self._engine, self._leader, self._followers = engine, LeaderEngine(engine, followers.send), followers
        self._threads = threads
        self._dead = self._closed = False
        self.spec: EngineSpec = engine.spec
        self.eos_ids: frozenset[int] = engine.eos_ids
        self.device, self.dtype = engine.device, engine.dtype

    def launch(self, step: Step) -> None:
        with self._watching():
            self._leader.launch(step)

    def result(self) -> StepResult:
        """The oldest unread step's tokens. Raises `EngineDeadError` where a rank ends before they come: a GPU would
        wait for
        it for ever."""
        with self._watching():
            look = time.monotonic() + LOOK
            while not self._engine.arrived():
                time.sleep(POLL)
                if (now := time.monotonic()) >= look:
                    look = now + LOOK
                    if ended := self._followers.ended():
                        raise EngineDeadError(f"{ended}; if it said why, that is above")
            return self._leader.result()

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        try:
            yield
        except EngineDeadError:
            self._dead = True  # a rank may be gone that does not count as ended yet
            raise

    def close(self) -> None:
        """End the followers, then rank 0's part. Where a rank died, a GPU's memory stays taken until this process ends.
        Closing twice is allowed."""
        if self._closed:
            return
        self._closed = True
        died = self._dead or bool(self._followers.ended())
        self._followers.end_input()
        if died and self.device.type == "cuda":
            self._engine.abandon()
        else:
            self._leader.close()
        self._followers.close(wait=0.0 if died else GRACE)
        torch.set_num_threads(self._threads)


class Followers:
    """The processes of ranks 1 to ``size`` - 1."""

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
        """Hand the bytes to every follower. Raises `EngineDeadError` where one is gone."""
        for rank, process in enumerate(self._processes, 1):
            assert process.stdin is not None
            try:
                process.stdin.write(_LENGTH.pack(len(data)) + data)
                process.stdin.flush()
            except OSError as error:
                raise EngineDeadError(f"rank {rank} is gone ({self.ended() or error})") from error

    def watch(self, start: Callable[[], TorchEngine]) -> TorchEngine:
        """Run ``start``, which waits for the followers; raises `EngineDeadError` if one ends meanwhile.

        Ranks meet without a way to say that one will not come, so ``start`` runs in a thread that can be left behind.
        """
        done: list[TorchEngine] = []
        failed: list[BaseException] = []

        def run() -> None:
            try:
                done.append(start())
            except BaseException as error:  # raised again below, in the caller's thread
                failed.append(error)

        thread = threading.Thread(target=run, name="minisgl-rank-0-start", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(0.05)
            if thread.is_alive() and (ended := self.ended()):
                thread.join(1.0)  # rank 0 may be about to find the same fault, and says it better
                if thread.is_alive():
                    raise EngineDeadError(f"while starting, {ended}; its own message is above")
        if failed:
            raise failed[0]
        return done[0]

    def end_input(self) -> None:
        """Tell the followers that no more steps come."""
        for process in self._processes:
            if process.stdin is not None:
                with contextlib.suppress(OSError):  # it is gone: so much the better
                    process.stdin.close()

    def close(self, wait: float = GRACE) -> None:
        """End the followers, by force where they have not ended themselves within ``wait`` seconds."""
        self.end_input()
        deadline = time.monotonic() + wait
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            if process.poll() is None:
                process.kill()
                process.wait()

    def ended(self) -> str:
        """Which followers ended, and how; empty: all run."""
        ended = [(rank, p.returncode) for rank, p in enumerate(self._processes, 1) if p.poll() is not None]
        return ", ".join(f"rank {rank} ended with status {status}" for rank, status in ended)


def _reader(stream: BinaryIO) -> Callable[[], bytes | None]:
    """Frames as `Followers.send` writes them; None at the end."""

    def read() -> bytes | None:
        head = stream.read(_LENGTH.size)
        if len(head) < _LENGTH.size:
            return None
        size = _LENGTH.unpack(head)[0]
        data = stream.read(size)
        return data if len(data) == size else None

    return read


def main(argv: Sequence[str] | None = None) -> None:
    """One follower: read the config, build the engine, replay steps until the input ends."""
    parser = argparse.ArgumentParser(prog="python -m minisgl.engine.followers")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--parent", type=int, required=True)
    args = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the keyboard's is for rank 0; we end with our input
    threading.Thread(target=_end_with, args=(args.parent,), name="parent-watch", daemon=True).start()
    read = _reader(sys.stdin.buffer)
    data = read()
    if data is None:
        return
    try:
        manager = PluginManager.load(plugins_of(data))
        engine = build_engine(decode_config(data, manager), manager, args.rank, args.size, args.address)
        follow(engine, read)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # to take an engine down could mean to wait for a peer that is gone
    engine.close()


def _end_with(parent: int) -> None:
    """End this process when its parent has ended, even while it waits for a device."""
    while os.getppid() == parent:
        time.sleep(LOOK)
    os._exit(1)


if __name__ == "__main__":
    main()

"""The ranks of an `LLM` or a benchmark: this process is rank 0, and the others are child processes of it.

The children (``python -m minisgl.plugins.ranks.children``) import nothing from the caller's ``__main__``. Each child
reads its config and then its steps from its standard input: a pipe loses no data, and reaches end-of-file when rank 0's
process ends. A child imports torch only when it ignores Ctrl-C and watches its parent.
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
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, BinaryIO

from minisgl.cluster.process import free_port, when_parent_ends
from minisgl.core import EngineDeadError
from minisgl.engine.ranks import Peers, follow
from minisgl.hooks import hookimpl
from minisgl.plugin_manager.encoding import decode_config, encode_config, plugins_of
from minisgl.plugin_manager.manager import PluginManager
from minisgl.utils.log import setup_logging

if TYPE_CHECKING:
    from minisgl.config import Config
    from minisgl.engine.engine import TorchEngine

log = logging.getLogger(__name__)

_LENGTH = struct.Struct("<Q")
GRACE = 5.0
"""Seconds that child processes have to exit after their standard input is closed. After that they are killed."""
PARENT_POLL_SECONDS = 0.1
"""Seconds between two checks that a child's parent still runs."""
RESULT_POLL_SECONDS = 2e-5
"""Seconds between two queries of the device while rank 0 waits for a result and watches the other ranks."""
CHILD_POLL_SECONDS = 0.1
"""Seconds between two checks that the children still run."""


@hookimpl(trylast=True)
def minisgl_start_ranks(config: Config, manager: PluginManager) -> TorchEngine:
    """Build rank 0's engine in this process and start ``config.tp - 1`` child processes for the other ranks."""
    import torch

    from minisgl.engine.build import build_engine

    address = f"127.0.0.1:{free_port()}"
    ranks = ChildRanks(encode_config(config, manager), config.tp, address, torch.get_num_threads())
    try:
        engine = ranks.watch(lambda: build_engine(config, manager, 0, config.tp, address))
    except BaseException:
        ranks.close(failed=True)
        raise
    engine.peers = ranks
    return engine


class ChildRanks(Peers):
    """The ranks 1 to ``size - 1`` as child processes. ``config`` is the encoded config, which is sent to each of them.

    ``threads`` is torch's thread count before the engine was built; `close` sets torch back to this count.
    """

    def __init__(self, config: bytes, size: int, address: str, threads: int):
        self._threads = threads
        command = [sys.executable, "-m", "minisgl.plugins.ranks.children", "--size", str(size), "--address", address]
        command += ["--parent", str(os.getpid())]
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(1, size):
                process = subprocess.Popen([*command, "--rank", str(rank)], stdin=subprocess.PIPE)
                self._processes.append(process)
            self.send(config)
        except BaseException:
            self.close(failed=True)
            raise

    def send(self, data: bytes) -> None:
        """Write the length and the bytes to every child's pipe. Raises `EngineDeadError` if a pipe is closed."""
        for rank, process in enumerate(self._processes, 1):
            assert process.stdin is not None
            try:
                process.stdin.write(_LENGTH.pack(len(data)) + data)
                process.stdin.flush()
            except OSError as error:
                raise EngineDeadError(f"rank {rank} is gone ({self.exited() or error})") from error

    def watch(self, start: Callable[[], TorchEngine]) -> TorchEngine:
        """Run ``start``, which waits for the other ranks, and return its result.

        Raises `EngineDeadError` if a rank exits before ``start`` returns, and any error that ``start`` raises.
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

    def wait(self, ready: Callable[[], bool]) -> None:
        """Wait until ``ready()`` is true. Raise `EngineDeadError` if a rank exits before."""
        next_check = time.monotonic() + CHILD_POLL_SECONDS
        while not ready():
            time.sleep(RESULT_POLL_SECONDS)
            if (now := time.monotonic()) >= next_check:
                next_check = now + CHILD_POLL_SECONDS
                if exited := self.exited():
                    raise EngineDeadError(f"{exited}; its own error message, if any, is above")

    def end(self) -> None:
        """Close the children's input: no step follows."""
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()

    def close(self, failed: bool) -> None:
        """Close the children's input, at which they end, and wait until all of them have ended.

        Children that still run after `GRACE` seconds are killed. If ``failed``, all children are killed at once.
        """
        self.end()
        deadline = time.monotonic() + (0.0 if failed else GRACE)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            if process.poll() is None:
                process.kill()
                process.wait()
        import torch

        torch.set_num_threads(self._threads)

    def exited(self) -> str:
        """Return which ranks have exited, with their exit status, as text. Return "" if all of them run."""
        exited = [(rank, p.returncode) for rank, p in enumerate(self._processes, 1) if p.poll() is not None]
        return ", ".join(f"rank {rank} ended with status {status}" for rank, status in exited)


def _message_reader(stream: BinaryIO) -> Callable[[], bytes | None]:
    """Return a function that reads the next message of `ChildRanks.send` from ``stream``, or None at end-of-file."""

    def read() -> bytes | None:
        header = stream.read(_LENGTH.size)
        if len(header) < _LENGTH.size:
            return None
        size = _LENGTH.unpack(header)[0]
        data = stream.read(size)
        return data if len(data) == size else None

    return read


def main(argv: Sequence[str] | None = None) -> None:
    """Run one child: read the config, build the engine, replay steps until standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m minisgl.plugins.ranks.children")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--parent", type=int, required=True)
    args = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by rank 0, which closes this standard input
    # Even if the main thread waits for a device.
    when_parent_ends(lambda: os._exit(1), PARENT_POLL_SECONDS, args.parent)
    read = _message_reader(sys.stdin.buffer)
    data = read()
    if data is None:
        return
    try:
        from minisgl.engine.build import build_engine

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


if __name__ == "__main__":
    main()

"""The total memory and disk space of a submission's processes: they are measured, and all are killed above a limit.

The limits of `isolation.LIMITS` hold for one process or one file each. A submission may start many processes and write
many files, so the sums need limits too.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil

from minisgl.chapters.lab.grader.gate import Broken

__all__ = ["DISK_BYTES", "MEMORY_BYTES", "Usage", "UsageLimit"]

MEMORY_BYTES = 4 * 2**30
"""Memory of all processes of a submission together, in bytes: their own pages, shared pages and files in memory."""
DISK_BYTES = 2**30
"""Disk space of a submission, in bytes: the copy of its files, its log, and all that its processes write."""
POLL_SECONDS = 0.1
"""Seconds between two measurements."""
_LEAST_FILE = 4096
"""Bytes that a file counts at least, because an empty file needs an entry in its folder."""
_WRITABLE = ("", "tmp", "var/tmp", "dev/shm")
"""The folders of a confined process' own file systems, as in `confine.build_root`."""


class Usage:
    """Bytes of memory and of disk that the processes below this one, and the folder ``at``, use now."""

    def __init__(self, at: Path):
        self._seen: set[tuple[int, int]] = set()  # open files without a name, and file systems
        self.disk = _size(at)
        self.memory = 0
        processes = psutil.Process().children(recursive=True)
        for process in processes:
            with contextlib.suppress(psutil.Error, OSError):
                self.memory += process.memory_info().rss
        if self.memory > MEMORY_BYTES:  # processes that were forked share pages, which RSS counts several times
            self.memory = sum(map(_proportional, processes))
        for process in processes:
            with contextlib.suppress(OSError):
                self._add_open_files(process.pid)
            with contextlib.suppress(OSError):
                self._add_own_file_systems(process.pid)

    def _add_open_files(self, pid: int) -> None:
        """Add the open files that have no name any more, and never had one: a walk of the folder does not see them."""
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                status = entry.stat()
                key = (status.st_dev, status.st_ino)
                if stat.S_ISREG(status.st_mode) and status.st_nlink == 0 and key not in self._seen:
                    self._seen.add(key)
                    if os.readlink(entry.path).startswith("/memfd:"):
                        self.memory += status.st_blocks * 512
                    else:
                        self.disk += status.st_blocks * 512

    def _add_own_file_systems(self, pid: int) -> None:
        """Add the file systems in memory that a process with a root folder of its own can write."""
        root = f"/proc/{pid}/root/"
        if os.stat(root).st_dev == os.stat("/").st_dev:
            return
        for folder in _WRITABLE:
            key = (os.stat(root + folder).st_dev, 0)
            if key not in self._seen:
                self._seen.add(key)
                used = _used(root + folder)
                self.disk += used
                self.memory += used


def _proportional(process: psutil.Process) -> int:
    """Return a process' memory. A page that n processes share counts 1/n. Without the right to read that: its RSS."""
    with contextlib.suppress(psutil.Error, OSError):
        return int(process.memory_full_info().pss)
    with contextlib.suppress(psutil.Error, OSError):
        return int(process.memory_info().rss)
    return 0


def _used(path: str | Path) -> int:
    found = os.statvfs(path)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def _size(at: Path) -> int:
    """Return the used bytes of a folder: of its file system, if the folder has its own."""
    if at.is_mount():
        return _used(at)
    total = 0
    for folder, folders, files in os.walk(at):
        for each in [*folders, *files]:
            with contextlib.suppress(OSError):
                total += max(os.lstat(os.path.join(folder, each)).st_blocks * 512, _LEAST_FILE)
        if total > DISK_BYTES:
            break
    return total


class UsageLimit:
    """Measures the processes below this one in a thread. Above a limit, it kills them and sets ``broken``.

    ``at``: the folder of the submission. A context manager. Once ``broken`` is set, all later processes are killed too.
    """

    def __init__(self, at: Path, memory: int = MEMORY_BYTES, disk: int = DISK_BYTES):
        self._at, self._memory, self._disk = at, memory, disk
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="usage", daemon=True)
        self.broken: Broken | None = None

    def __enter__(self) -> UsageLimit:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(POLL_SECONDS):
            if self.broken is None:
                self.broken = next(self._exceeded(Usage(self._at)), None)
            if self.broken is not None:
                for process in psutil.Process().children(recursive=True):
                    with contextlib.suppress(psutil.Error):
                        process.kill()

    def _exceeded(self, used: Usage) -> Iterator[Broken]:
        for cause, bytes_, limit in (("memory", used.memory, self._memory), ("disk", used.disk, self._disk)):
            if bytes_ > limit:
                promise = f"All processes of a submission together use at most {limit / 2**30:g} GiB of {cause}."
                seen = f"The processes together used {bytes_ / 2**30:.1f} GiB of {cause}, and were killed."
                yield Broken(cause, promise, seen)

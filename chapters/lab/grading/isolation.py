"""How far the grader can isolate a student's process on this machine, and the command that does it.

`isolate` tries the strongest isolation first, with a harmless command, and falls back step by step. What it could not
do is in `Isolation.notes`, which every report repeats. `minisgl.chapters.lab.grading.confine` does the work.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pwd
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from minisgl.chapters.lab.grading import confine
from minisgl.chapters.lab.grading.usage import DISK_BYTES, MEMORY_BYTES

__all__ = ["LIMITS", "TOTALS", "Isolation", "isolate", "own_mounts", "own_network"]

UNPRIVILEGED = 65534
"""The number of the user that Linux has for processes without rights."""
LIMITS = {
    "CPU": 900,  # seconds of processor time of one process
    "DATA": 6 * 2**30,  # bytes
    "NPROC": 1024,  # processes and threads of the user
    "FSIZE": 256 * 2**20,  # bytes of one file
    "NOFILE": 1024,
    "CORE": 0,
}
"""Resource limits of every process with a student's code."""
TOTALS = {"memory": MEMORY_BYTES, "disk": DISK_BYTES}
"""Limits of all processes of a submission together, in bytes. `minisgl.chapters.lab.grading.usage` measures them."""


@dataclass
class Isolation:
    """What separates the student's process from the machine.

    ``network``: only a loopback device of its own. ``files``: it sees only system files, the clean installation and its
    own folder. ``processes``: it sees only its own. ``user``: the name of its user, None: the grader's. ``own_mounts``:
    this process has mounts of its own, so the folder of a submission can be a file system of limited size.
    """

    network: bool = False
    files: bool = False
    processes: bool = False
    user: str | None = None
    limits: dict[str, int] = field(default_factory=lambda: dict(LIMITS))
    totals: dict[str, int] = field(default_factory=lambda: dict(TOTALS))
    own_mounts: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether no part is missing."""
        return self.network and self.files and self.processes and self.user is not None

    def encode(self) -> dict[str, Any]:
        """Return the isolation as a dictionary that JSON can hold."""
        found = asdict(self)
        del found["own_mounts"]
        return found

    def ids(self) -> tuple[int | None, int | None]:
        """Return the user and group of the student's process; None: those of the grader."""
        if self.user is None:
            return None, None
        found = pwd.getpwnam(self.user)
        return found.pw_uid, found.pw_gid

    def writable(self, path: Path, work: Path) -> Path:
        """Return a copy of a submitted folder in ``work`` that the student's processes can write: they build it."""
        copy = Path(shutil.copytree(path, work / path.name))
        uid, gid = self.ids()
        for folder, _, files in os.walk(copy):
            for each in [Path(folder), *(Path(folder, file) for file in files)]:
                each.chmod(0o755 if each.is_dir() else 0o644)
                if uid is not None and gid is not None:
                    os.chown(each, uid, gid)
        return copy

    @contextlib.contextmanager
    def box(
        self, expose: list[str], hide: list[str], files: list[Path]
    ) -> Iterator[tuple[list[str], Path, list[Path]]]:
        """Make a folder for one submission. Yield the words before a confined command, the folder, and copied files.

        ``files`` (files or folders) are copied into the folder ``submission``, which the command can only read.
        """
        at = Path(tempfile.mkdtemp(prefix="minisgl-grade-"))
        at.chmod(0o755)
        if self.own_mounts:
            confine.mount_memory(str(at), self.totals["disk"])
        try:
            uid, gid = self.ids()
            root, work, given = at / "root", at / "work", at / "submission"
            for folder in (root, work, given):
                folder.mkdir(mode=0o755)
            copies = [_copied(path, given / path.name) for path in files]
            if uid is not None and gid is not None:
                os.chown(work, uid, gid)
            spec = {"root": str(root), "work": str(work), "expose": [*expose, str(given)], "hide": hide, "uid": uid,
                    "gid": gid, "mounts": self.files, "pids": self.processes, "limits": self.limits,
                    "temporary": self.totals["disk"] // 4}  # fmt: skip
            (at / "spec.json").write_text(json.dumps(spec))
            yield [sys.executable, "-I", confine.__file__, str(at / "spec.json"), "--"], work, copies
        finally:
            if self.own_mounts:
                confine.unmount(str(at))
            shutil.rmtree(at, ignore_errors=True)


def _copied(source: Path, target: Path) -> Path:
    """Copy a file or a folder, readable for everyone and writable only for its owner. Links are not followed."""
    if source.is_dir() and not source.is_symlink():
        target.mkdir()
        for part in sorted(source.iterdir()):
            if not part.name.startswith(".") and part.name != "__pycache__":
                _copied(part, target / part.name)
        target.chmod(0o755)
    elif source.is_file() and not source.is_symlink():
        shutil.copyfile(source, target)
        target.chmod(0o444)
    return target


def isolate(user: str | None, expose: list[str], hide: list[str], python: Path) -> Isolation:
    """Return the strongest isolation that works here.

    ``user`` None: the user with the number `UNPRIVILEGED`, if this process may choose a user.

    ``expose``, ``hide`` and ``python`` are those of a clean installation. Call it in the process that will run the
    submissions, after `own_network`.
    """
    notes: list[str] = []
    root = os.geteuid() == 0
    inside = _is_user_namespace()
    name = user or pwd.getpwuid(UNPRIVILEGED).pw_name
    if not root:
        notes.append("not run as root, and the machine allows no user namespace")
    elif inside:
        notes.append("not run as root: the student's code runs as the grader's user, in a user namespace of its own")
    users = [name] if root and not inside else []
    tries = [(True, True, each) for each in [*users, None]] + [(False, False, each) for each in [*users, None]]
    for files, processes, each in tries:
        found = Isolation(files=files, processes=processes, user=each, notes=list(notes))
        problem = _problem(found, expose, hide, python)
        if problem is None:
            return found
        what = "another user" if each else "the grader's user"
        notes.append(f"{'namespaces' if files else 'no namespaces'} and {what} do not work: {problem}")
    raise RuntimeError(f"no confined process can be started: {'; '.join(notes)}")


def _problem(found: Isolation, expose: list[str], hide: list[str], python: Path) -> str | None:
    """Return why a harmless command does not run with this isolation, or None."""
    try:
        with found.box(expose, hide, []) as (words, _, _):
            command = [*words, str(python), "-c", "import minisgl, os; print(minisgl.__file__, os.getuid())"]
            ran = subprocess.run(
                command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL, check=False
            )
    except (OSError, KeyError, subprocess.TimeoutExpired) as error:
        return f"{error}"
    if ran.returncode:
        return " ".join((ran.stderr.strip().splitlines() or [f"exit status {ran.returncode}"])[-1].split())[:200]
    return None


def _is_user_namespace() -> bool:
    with contextlib.suppress(OSError):
        return Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]
    return False


def own_network() -> str | None:
    """Move this process into a network that has only a loopback device. Return why that failed, or None.

    Without root rights, the process also becomes root of a new user namespace, which allows the other namespaces.
    """
    try:
        if os.geteuid() == 0:
            confine.unshare(confine.NEW_NET)
        else:
            uid, gid = os.getuid(), os.getgid()
            confine.unshare(confine.NEW_USER | confine.NEW_NET)
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
            Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
        _raise_loopback()
    except OSError as error:
        return str(error)
    return None


def own_mounts() -> str | None:
    """Give this process mounts that no other process sees. Return why that failed, or None."""
    try:
        confine.unshare(confine.NEW_MOUNTS)
        confine.make_mounts_private()
    except OSError as error:
        return str(error)
    return None


def _raise_loopback() -> None:
    """Switch the loopback device on: SIOCGIFFLAGS and SIOCSIFFLAGS."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("16sh14x", b"lo", 0)
        _, flags = struct.unpack("16sh14x", fcntl.ioctl(sock, 0x8913, request))
        fcntl.ioctl(sock, 0x8914, struct.pack("16sh14x", b"lo", flags | 1))

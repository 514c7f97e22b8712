"""Runs a command in a confined process: a file tree of its own, no other processes in sight, another user, limits.

``python -I confine.py SPEC -- COMMAND…`` reads the JSON file SPEC, which `isolation` writes. It uses
Linux namespaces by their system calls, and the standard library only. Every step that SPEC asks for must succeed: the
caller tries beforehand which steps the machine allows. The command sees a root folder that holds the system's folders,
the folders in ``expose`` (read-only) and ``work`` (writable), and nothing else of the machine's files.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)
NEW_MOUNTS, NEW_PIDS, NEW_IPC, NEW_USER, NEW_NET = 0x20000, 0x20000000, 0x08000000, 0x10000000, 0x40000000
"""Flags of Linux' unshare: CLONE_NEWNS, CLONE_NEWPID, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWNET."""
_READ_ONLY, _NOSUID, _NODEV, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", "/sys/devices/system", "/opt")
DEVICES = ("null", "zero", "full", "random", "urandom")
KEPT = ("LANG", "LC_ALL", "OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM", "PYTHONPATH")
"""Environment variables that the command gets. The others of the instructor's shell stay outside."""


def unshare(flags: int) -> None:
    """Move this process into new namespaces. Raise OSError if that is not allowed."""
    _check(_LIBC.unshare(flags), "unshare")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    result = _LIBC.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode())
    _check(result, f"mount {target}")


def _bind(source: str, target: str, writable: bool = False) -> None:
    """Show the file or folder ``source`` at ``target``."""
    at = Path(target)
    if os.path.isdir(source):
        at.mkdir(parents=True, exist_ok=True)
    else:
        at.parent.mkdir(parents=True, exist_ok=True)
        at.touch()
    _mount(source, target, "", _BIND | (_RECURSIVE if not writable else 0))
    more = 0 if writable else _READ_ONLY
    device = 0 if source.startswith("/dev/") else _NODEV
    _mount("", target, "", _BIND | _REMOUNT | _NOSUID | device | more)


def make_mounts_private() -> None:
    """Keep the later mounts of this process' mount namespace out of all other namespaces."""
    _mount("", "/", "", _RECURSIVE | _PRIVATE)


def mount_memory(target: str, size: int) -> None:
    """Mount a file system in memory, of at most ``size`` bytes."""
    _mount("tmpfs", target, "tmpfs", _NOSUID | _NODEV, f"mode=755,size={size}")


def unmount(target: str) -> None:
    """Unmount a file system, at the latest when no process uses it any more (MNT_DETACH)."""
    _check(_LIBC.umount2(target.encode(), 2), f"unmount {target}")


def build_root(spec: dict[str, Any]) -> str:
    """Build the command's root folder in a new mount namespace, and return its path."""
    root = str(spec["root"])
    make_mounts_private()
    _mount("tmpfs", root, "tmpfs", _NOSUID | _NODEV, "mode=755,size=16m")
    for folder in ("tmp", "var/tmp", "dev/shm", "proc"):
        Path(root, folder).mkdir(parents=True)
    for folder in ("tmp", "var/tmp", "dev/shm"):
        _mount("tmpfs", f"{root}/{folder}", "tmpfs", _NOSUID | _NODEV, f"mode=1777,size={spec['temporary']}")
    for path in SYSTEM:
        if os.path.islink(path):
            os.symlink(os.readlink(path), root + path)
        elif os.path.isdir(path):
            _bind(path, root + path)
    for name in DEVICES:
        _bind(f"/dev/{name}", f"{root}/dev/{name}")
    for path in spec["expose"]:
        if not path.startswith("/usr/"):  # those are there already
            _bind(path, root + path)
    for path in spec["hide"]:
        if os.path.isdir(root + path):
            _mount("tmpfs", root + path, "tmpfs", _NOSUID | _NODEV | _READ_ONLY, "mode=755,size=4k")
    _bind(spec["work"], root + spec["work"], writable=True)
    return root


def drop_privileges(spec: dict[str, Any]) -> None:
    """Set the limits, become the user of the spec, and give up every capability for good."""
    for name, value in spec["limits"].items():
        number = getattr(resource, f"RLIMIT_{name}")
        _, hard = resource.getrlimit(number)
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (most, most))
    if os.geteuid() == 0:
        for capability in range(64):
            _LIBC.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
    if spec["uid"] is not None:
        os.setgroups([])
        os.setresgid(spec["gid"], spec["gid"], spec["gid"])
        os.setresuid(spec["uid"], spec["uid"], spec["uid"])
    _check(_LIBC.prctl(38, 1, 0, 0, 0), "prctl")  # PR_SET_NO_NEW_PRIVS


def environment(spec: dict[str, Any]) -> dict[str, str]:
    """Return the command's environment variables."""
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    home = spec["work"]
    temporary = "/tmp" if spec["mounts"] else home
    return {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": home, "TMPDIR": temporary, "LANG": "C.UTF-8", **kept}


def _start(spec: dict[str, Any], command: list[str], root: str) -> int:
    """Fork the command, as a child of the first process of the new process namespace. Return its process id."""
    pid = os.fork()
    if pid:
        return pid
    os.setpgid(0, 0)
    if spec["mounts"]:
        os.chroot(root)
    os.chdir(spec["work"])
    os.umask(0o077)
    drop_privileges(spec)
    _LIBC.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG, which a change of the user resets
    os.execve(command[0], command, environment(spec))


def _wait(pid: int) -> int:
    """Wait for a child and for every orphan. Return the child's status as a shell does."""
    while True:
        ended, status = os.wait()
        if ended == pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _pass_on(pid: int) -> None:
    """Pass SIGINT and SIGTERM on to a child."""

    def send(number: int, frame: Any) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, send)


def main(words: list[str]) -> int:
    """Run the command and return its exit status."""
    spec = json.loads(Path(words[0]).read_text("utf-8"))
    command = words[words.index("--") + 1 :]
    root = ""
    if spec["mounts"]:
        unshare(NEW_MOUNTS | NEW_IPC)
        with contextlib.suppress(OSError):  # System V shared memory, in pages
            Path("/proc/sys/kernel/shmall").write_text(str(spec["temporary"] // os.sysconf("SC_PAGE_SIZE")))
        root = build_root(spec)
    if spec["pids"]:
        unshare(NEW_PIDS)
    first = os.fork()  # with a new process namespace, its first process: when it ends, all others are killed
    if first:
        _pass_on(first)
        return _wait(first)
    _LIBC.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: this process ends with its parent
    if spec["mounts"] and spec["pids"]:
        _mount("proc", f"{root}/proc", "proc", _NOSUID | _NODEV)
    pid = _start(spec, command, root)
    for descriptor in range(3, 256):  # they belong to the command only
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _pass_on(pid)
    os._exit(_wait(pid))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The folder of a server's Unix sockets: a later server removes it, if the server was killed with all of its processes.

The folder has the mode 0700, so no other user can connect to a socket in it. The process that makes the folder holds a
lock (``flock``) on it, which the operating system releases however the process ends. A folder without a lock is left
over from a server that was killed together with all of its processes: `make_folder` removes such folders.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

PREFIX = "minisgl-sockets-"
_MAX_FOLDER = 80
"""The largest length of the folder's path in bytes. The address of a Unix socket has at most 103 bytes on macOS."""

_locks: dict[str, int] = {}  # path of a folder that this process has made -> the descriptor that locks the folder


def make_folder() -> str:
    """Make a folder for sockets, lock it, and return its path. Remove the folders that no process has locked.

    The folder is in the folder for temporary files (``TMPDIR``), or in ``/tmp`` where that path is too long.
    """
    base = tempfile.gettempdir()
    if len(os.fsencode(base)) + len(PREFIX) + 9 > _MAX_FOLDER:
        base = "/tmp"
    for left in Path(base).glob(f"{PREFIX}*"):
        _remove_if_left(str(left))
    while True:
        folder = tempfile.mkdtemp(prefix=PREFIX, dir=base)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.isdir(folder):
            _locks[folder] = lock
            return folder
        os.close(lock)  # another server removed the folder before the lock was held


def unlock(folder: str) -> None:
    """Release the lock of a folder, if this process has made it."""
    if (lock := _locks.pop(folder, None)) is not None:
        os.close(lock)


def _remove_if_left(folder: str) -> None:
    """Remove a folder if it is this user's and no process has locked it."""
    with contextlib.suppress(OSError):
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            found = os.fstat(lock)
            if found.st_uid == os.getuid() and stat.S_IMODE(found.st_mode) == 0o700:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
        finally:
            os.close(lock)

"""Copies a submission before it is graded, or refuses it: the grader and all its processes read only the copy.

The instructor's user can read files that the student can't. So a link in a submission is never followed: it could name
another student's solution or a private file. Special files and very large submissions are refused too.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from minisgl.chapters.lab.grading.text import name as shown_name

__all__ = ["RefusedError", "take_in"]

MOST_FILE_BYTES = 2 * 2**20
"""The largest file of a submission, in bytes."""
MOST_BYTES = 16 * 2**20
"""The largest submission, in bytes."""
MOST_ENTRIES = 1000
"""The largest number of files and folders in a submitted folder."""
MOST_DEPTH = 16
"""The largest number of folders inside each other."""
MOST_NAME_BYTES = 200
"""The longest name of a file or folder, in bytes of UTF-8."""
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


class RefusedError(Exception):
    """The submission is not graded. The message says which file is the reason, and what to change."""


def take_in(source: Path, target: Path, *, folder: bool) -> None:
    """Copy the file or, if ``folder``, the folder ``source`` to ``target``. Raise `RefusedError`.

    Hidden entries and ``__pycache__`` are left out. The folder that contains ``source`` must not be a link either.
    """
    try:
        parent = os.open(source.parent, _OPEN | os.O_DIRECTORY)
    except OSError as error:
        raise RefusedError(_why_not_opened(source.parent, error)) from None
    with _closing(parent):
        status = _status(parent, source.name, source.name)
        kind = "folder" if folder else "file"
        if stat.S_ISDIR(status.st_mode) != folder and (stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)):
            raise RefusedError(f"{source.name} is not a {kind}. This lab's submission is a {kind}.")
        _Copy().entry(parent, source.name, target, source.name, [])


def _why_not_opened(path: Path, error: OSError) -> str:
    if path.is_symlink():
        return f"the folder {shown_name(path.name)} is a symbolic link. Submit a copy of the files."
    return f"the folder {shown_name(path.name)} can't be read: {error.strerror}."


def _status(parent: int, name: str, shown: str) -> os.stat_result:
    """Return the status of an entry of the folder ``parent``. Raise `RefusedError` for a link or a special file."""
    try:
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except OSError as error:
        raise RefusedError(f"{shown} can't be read: {error.strerror}.") from None
    if stat.S_ISLNK(status.st_mode):
        raise RefusedError(f"{shown} is a symbolic link. Submit a copy of the file.")
    kind = _KINDS.get(stat.S_IFMT(status.st_mode))
    if kind is not None:
        raise RefusedError(f"{shown} is {kind}. A submission has only files and folders.")
    if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
        raise RefusedError(
            f"{shown} is a hard link: the same file has {status.st_nlink} names. Submit a copy of the file (`cp -r` of "
            "the submissions makes one)."
        )
    return status


@contextlib.contextmanager
def _closing(descriptor: int):  # type: ignore[no-untyped-def]
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class _Copy:
    """One copy, with the number of bytes and of entries so far."""

    def __init__(self) -> None:
        self.bytes = 0
        self.entries = 0

    def entry(self, parent: int, name: str, target: Path, shown: str, above: list[tuple[int, int]]) -> None:
        """Copy an entry of the folder ``parent``. ``shown``: its path. ``above``: device and inode of its folders."""
        self.entries += 1
        if self.entries > MOST_ENTRIES:
            raise RefusedError(
                f"the folder has more than {MOST_ENTRIES} files and folders. Submit only those of the lab."
            )
        status = _status(parent, name, shown)
        try:
            descriptor = os.open(name, _OPEN, dir_fd=parent)
        except OSError as error:
            raise RefusedError(f"{shown} can't be read: {error.strerror}.") from None
        with _closing(descriptor):
            opened = os.fstat(descriptor)
            if (opened.st_dev, opened.st_ino) != (status.st_dev, status.st_ino):
                raise RefusedError(f"{shown} was replaced while it was read.")
            if stat.S_ISDIR(opened.st_mode):
                self._folder(descriptor, target, shown, [*above, (opened.st_dev, opened.st_ino)])
            else:
                self._file(descriptor, opened.st_size, target, shown)

    def _folder(self, descriptor: int, target: Path, shown: str, path: list[tuple[int, int]]) -> None:
        if path[-1] in path[:-1] or len(path) > MOST_DEPTH:
            raise RefusedError(
                f"{shown}: more than {MOST_DEPTH} folders are inside each other, or a folder is in itself."
            )
        target.mkdir()
        for name in sorted(os.listdir(descriptor)):
            if name.startswith(".") or name == "__pycache__":
                continue
            inner = f"{shown}/{shown_name(name)}"
            if not name.isprintable() or len(os.fsencode(name)) > MOST_NAME_BYTES:
                raise RefusedError(
                    f"{inner}: the name is too long, or has a character that can't be printed. Rename it."
                )
            self.entry(descriptor, name, target / name, inner, path)

    def _file(self, descriptor: int, size: int, target: Path, shown: str) -> None:
        if size > MOST_FILE_BYTES:
            raise RefusedError(f"{shown} has {size} bytes; a file may have {MOST_FILE_BYTES}.")
        with open(descriptor, "rb", closefd=False) as source:
            try:
                data = source.read(MOST_FILE_BYTES + 1)
            except OSError as error:
                raise RefusedError(f"{shown} can't be read: {error.strerror}.") from None
        self.bytes += len(data)
        if len(data) > MOST_FILE_BYTES or self.bytes > MOST_BYTES:
            raise RefusedError(
                f"{shown}: a file may have {MOST_FILE_BYTES} bytes, and the submission {MOST_BYTES} in all."
            )
        target.write_bytes(data)

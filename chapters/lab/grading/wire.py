"""The messages between the grader and the process in which a student's code runs: bounded, MessagePack, no pickle.

Both sides use this module. A message is 4 bytes of length and a MessagePack value. Values are plain data: numbers,
text, lists, tuples, dicts, numpy arrays, and the records in `RECORDS`. Any other object stays in its own process, and
the message carries its number, a `Reference`. The receiver builds nothing but these types, so a message can't run code.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import msgspec
import numpy as np

from minisgl.core import Admission, EngineSpec, PromptRange, SamplingParams, Step, StepResult
from minisgl.plugins.cache.base import InsertResult, Key, MatchResult
from minisgl.scheduler.base import Plan, Running, Waiting
from minisgl.scheduler.planner import WaitingView

__all__ = ["Channel", "Lost", "Malformed", "Record", "Reference", "decode", "encode"]

MOST_BYTES = 32 * 2**20
"""The largest message. A prompt of 300,000 tokens has 1.2 MB."""
DEPTH = 40
"""The largest depth of nested lists, tuples and dicts in a message."""

RECORDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        Waiting, Running, Plan, Key, MatchResult, InsertResult, Step, StepResult, Admission, PromptRange, EngineSpec,
    )
}  # fmt: skip
"""Records that both sides know by name. Their fields are encoded in order."""
_DTYPES = {"|b1", "|u1", "|i1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f4", "<f8"}
_TUPLE, _DICT, _SET, _ARRAY, _RECORD, _NAMED, _PARAMS, _LARGE, _REFERENCE, _REQUEST = range(1, 11)


class Lost(Exception):  # noqa: N818
    """The other process has closed its end of the channel."""


class Malformed(Exception):  # noqa: N818
    """A message is too large, or is not a value that this module encodes."""


class Reference:
    """The number of an object that is in the other process. ``what`` is its type in words."""

    def __init__(self, number: int, what: str):
        self.number, self.what = number, what


class Record(tuple[Any, ...]):
    """A named tuple whose class is defined in the other process: its values, which are attributes too."""

    names: tuple[str, ...]

    def __new__(cls, kind: str, names: tuple[str, ...], values: tuple[Any, ...]) -> Record:
        """Return a record with ``values`` for the fields ``names``."""
        record = super().__new__(cls, values)
        record.kind, record.names = kind, names
        return record

    kind: str

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("names", ()):
            return self[self.names.index(name)]
        raise AttributeError(f"{self.__dict__.get('kind', 'Record')} has no field {name!r}")

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in zip(self.names, self, strict=True))
        return f"{self.kind}({shown})"


# ---- encoding ----------------------------------------------------------------------------------------------

Refer = Callable[[Any], list[Any] | None]
"""Returns what a message carries for an object that stays here, ``[code, value]`` with a code from `codes`."""


def encode(value: Any, refer: Refer) -> bytes:
    """Return a value as bytes. ``refer(object)`` returns the message's value for an object of another type."""
    return msgspec.msgpack.encode(_plain(value, refer, 0))


def _ext(code: int, value: Any) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(value))


def _plain(value: Any, refer: Refer, depth: int) -> Any:
    if depth > DEPTH:
        raise Malformed(f"the value is nested deeper than {DEPTH} levels")
    if value is None or isinstance(value, bool | float | str | bytes):
        return _exact(value)
    if isinstance(value, int):
        number = int(value)
        return number if -(2**63) <= number < 2**63 else _ext(_LARGE, str(number) if abs(number) < 2**200 else "0")
    if isinstance(value, np.generic) and value.dtype.str in _DTYPES:
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.str in _DTYPES:
        return _ext(_ARRAY, [value.dtype.str, list(value.shape), value.tobytes()])
    if isinstance(value, SamplingParams):
        return _ext(_PARAMS, msgspec.to_builtins(value, str_keys=True))
    return _composed(value, refer, depth + 1)


def _fields(value: Any) -> list[str]:
    """Return the names of the fields of a struct or a dataclass."""
    return list(value.__struct_fields__) if isinstance(value, msgspec.Struct) else [f.name for f in fields(value)]


def _exact(value: Any) -> Any:
    """Return the value without its subclass, which could define comparisons of its own."""
    kinds: tuple[Any, ...] = (bool, float, str, bytes)
    return next((kind(value) for kind in kinds if isinstance(value, kind)), None)


def _composed(value: Any, refer: Refer, depth: int) -> Any:
    def parts(values: Any) -> list[Any]:
        return [_plain(part, refer, depth) for part in values]

    name: str = type(value).__name__
    if RECORDS.get(name) is type(value):
        given = list(value) if isinstance(value, tuple) else [getattr(value, field) for field in _fields(value)]
        if name in ("MatchResult", "InsertResult"):  # a handle keeps its identity, whatever its type
            return _ext(_RECORD, [name, [_handle(given[0], refer, depth), *parts(given[1:])]])
        return _ext(_RECORD, [name, parts(given)])
    if isinstance(value, tuple):
        names = getattr(value, "_fields", None)
        if names is not None:
            return _ext(_NAMED, [name, list(map(str, names)), parts(value)])
        return _ext(_TUPLE, parts(value))
    if isinstance(value, list | deque | range):
        return parts(value)
    if isinstance(value, dict):
        return _ext(_DICT, [parts(pair) for pair in value.items()])
    if isinstance(value, set | frozenset):
        return _ext(_SET, parts(value))
    if isinstance(value, WaitingView):
        return parts(value)
    return _referred(value, refer)


def _handle(value: Any, refer: Refer, depth: int) -> Any:
    plain = value is None or isinstance(value, int | str | Reference)
    return _plain(value, refer, depth) if plain else _referred(value, refer)


def _referred(value: Any, refer: Refer) -> Any:
    found = refer(value)
    if found is None:
        raise Malformed(f"a {type(value).__name__} can't be sent")
    code, what = found
    return _ext({"reference": _REFERENCE, "request": _REQUEST}[code], what)


# ---- decoding ----------------------------------------------------------------------------------------------


def decode(data: bytes, resolve: Callable[[str, Any], Any]) -> Any:
    """Return the value of a message. Raise `Malformed` if it is not one.

    ``resolve(code, value)`` returns the object for a reference or a request.
    """
    try:
        return _Decoder(resolve).decode(data, 0)
    except Malformed:
        raise
    except (msgspec.MsgspecError, ValueError, TypeError, KeyError, IndexError, RecursionError, OverflowError) as error:
        raise Malformed(f"{type(error).__name__}: {error}") from error


class _Decoder:
    def __init__(self, resolve: Callable[[str, Any], Any]):
        self.resolve = resolve

    def decode(self, data: bytes | memoryview, depth: int) -> Any:
        if depth > DEPTH:
            raise Malformed(f"the value is nested deeper than {DEPTH} levels")
        return msgspec.msgpack.decode(data, ext_hook=lambda code, inner: self.ext(code, inner, depth + 1))

    def ext(self, code: int, data: memoryview, depth: int) -> Any:
        value = self.decode(data, depth)
        if code == _TUPLE:
            return tuple(value)
        if code == _DICT:
            return dict((key, entry) for key, entry in value)  # noqa: C402 - each pair is a list
        if code == _SET:
            return set(value)
        if code == _ARRAY:
            dtype, shape, raw = value
            if dtype not in _DTYPES:
                raise Malformed(f"the dtype {dtype!r}")
            return np.frombuffer(raw, dtype=dtype).reshape(shape).copy()
        if code == _RECORD:
            name, given = value
            return RECORDS[name](*given)
        if code == _NAMED:
            kind, names, given = value
            if len(names) != len(given):
                raise Malformed("a record whose names and values differ in number")
            return Record(str(kind), tuple(map(str, names)), tuple(given))
        if code == _PARAMS:
            return msgspec.convert(value, SamplingParams, strict=False)
        if code == _LARGE:
            return int(value)
        if code in (_REFERENCE, _REQUEST):
            return self.resolve("reference" if code == _REFERENCE else "request", value)
        raise Malformed(f"the extension {code}")


# ---- the channel -------------------------------------------------------------------------------------------


class Channel:
    """One end of a socket on which messages are sent."""

    def __init__(self, sock: socket.socket):
        self._socket = sock
        self._rest = b""  # bytes of the next message

    def close(self) -> None:
        """Close this end."""
        with contextlib.suppress(OSError):
            self._socket.close()

    def send(self, data: bytes) -> None:
        """Send an encoded message. Raise `Lost` if the other end is closed."""
        if len(data) > MOST_BYTES:
            raise Malformed(f"a message of {len(data)} bytes; at most {MOST_BYTES} are allowed")
        try:
            self._socket.sendall(len(data).to_bytes(4, "big") + data)
        except OSError as error:
            raise Lost(str(error)) from error

    def receive(self, until: float | None = None) -> bytes:
        """Return the next message. Raise `Lost` at the end, and TimeoutError at the time ``until`` of `time.monotonic`.

        Raise `Malformed` if the message is too large.
        """
        size = int.from_bytes(self._exactly(4, until), "big")
        if size > MOST_BYTES:
            raise Malformed(f"a message of {size} bytes; at most {MOST_BYTES} are allowed")
        return self._exactly(size, until)

    def _exactly(self, size: int, until: float | None) -> bytes:
        """Return the next ``size`` bytes. What arrives beyond them is kept for the next call."""
        pieces, have = [self._rest], len(self._rest)
        while have < size:
            if until is not None and not select.select([self._socket], [], [], max(until - time.monotonic(), 0))[0]:
                raise TimeoutError
            try:
                piece = self._socket.recv(2**16 if size - have < 2**16 else 2**20)
            except OSError as error:
                raise Lost(str(error)) from error
            if not piece:
                raise Lost("the other process has closed the channel")
            pieces.append(piece)
            have += len(piece)
        data = b"".join(pieces)
        self._rest = data[size:]
        return data[:size]

"""Reader of the header of a GGUF file: its metadata, and where which tensor is. It reads no weights.

GGUF is llama.cpp's format, described in docs/gguf.md of the ggml repository. A header is a count of metadata entries
and one of tensors; then the entries, each a key, a type and a value; then for each tensor its name, its dimensions (the
fastest first), its type and its offset from the end of the header. Versions 2 and 3 are read, in little-endian order.

Nothing in the file is believed: every count and every length is compared with what is left of the file before it is
used, so that a broken file costs neither memory nor time.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from minisgl.config import ConfigError

__all__ = ["BLOCKS", "Header", "StoredTensor", "read_header"]


class Block(NamedTuple):
    """The unit in which a type stores a row: ``elements`` numbers in ``size`` bytes."""

    name: str
    elements: int
    size: int


BLOCKS: Mapping[int, Block] = {
    0: Block("F32", 1, 4),
    1: Block("F16", 1, 2),
    2: Block("Q4_0", 32, 18),
    3: Block("Q4_1", 32, 20),
    8: Block("Q8_0", 32, 34),
    12: Block("Q4_K", 256, 144),
    14: Block("Q6_K", 256, 210),
    30: Block("BF16", 1, 2),
}
"""The number of a tensor type in the file → its blocks. ``minisgl.plugins.quantization.ggml.types`` decodes them."""

_OTHERS = {
    6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 13: "Q5_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS",
    18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32",
    27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
"""The names of types that are not read, for the error."""

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MAX_ITEMS = 1 << 22
"""The most items of an array, such as tokens of the vocabulary, and the most metadata entries and tensors."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor: ``shape`` is in torch's order, ``begin`` and ``size`` are in bytes of the file."""

    name: str
    block: Block
    shape: tuple[int, ...]
    begin: int
    size: int

    @property
    def row_size(self) -> int:
        """The bytes of one row: the numbers along the last dimension."""
        return self.shape[-1] // self.block.elements * self.block.size


@dataclass(frozen=True)
class Header:
    """The metadata and the tensors of a file, by their names."""

    file: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]


def read_header(file: Path) -> Header:
    """Read the header of ``file``. Raises `ConfigError` if the file is no GGUF file, is cut off, or can't be read."""
    try:
        with file.open("rb") as opened:
            try:
                data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError:
                raise _BrokenError("it is empty") from None
        with data:
            return _read(file, _Cursor(data))
    except OSError as error:
        raise ConfigError(f"{file} can't be read: {error.strerror or error}.") from None
    except _BrokenError as error:
        raise ConfigError(f"{file} can't be read as GGUF: {error}.") from None


class _BrokenError(Exception):
    """The file is not as the format says."""


class _Cursor:
    """A position in the file, from which values are read one after another."""

    def __init__(self, data: mmap.mmap):
        self.data, self.at = data, 0

    def bytes(self, count: int) -> bytes:
        """Read ``count`` bytes."""
        if count > len(self.data) - self.at:
            raise _BrokenError(f"it ends in the header, after {len(self.data)} bytes: download it again")
        begin, self.at = self.at, self.at + count
        return self.data[begin : self.at]

    def scalar(self, form: str) -> Any:
        return struct.unpack(form, self.bytes(struct.calcsize(form)))[0]

    def count(self, what: str, least: int) -> int:
        """Read a number of items that take at least ``least`` bytes each."""
        count: int = self.scalar("<Q")
        if count > min(_MAX_ITEMS, (len(self.data) - self.at) // least):
            raise _BrokenError(f"it claims to have {count} {what}, which is more than it can hold: download it again")
        return count

    def string(self) -> str:
        text = self.bytes(self.scalar("<Q"))
        try:
            return text.decode()
        except UnicodeDecodeError:
            raise _BrokenError(f"the string at byte {self.at - len(text)} is not UTF-8") from None

    def value(self, kind: int) -> Any:
        """Read a value of the metadata: a number, a truth value, a string, or a list of these."""
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise _BrokenError(f"its metadata has a value of the unknown type {kind}")
        kind = self.scalar("<I")
        if kind == _STRING:
            return [self.string() for _ in range(self.count("strings", 8))]
        if kind not in _SCALARS:
            raise _BrokenError(f"its metadata has an array of values of type {kind}, which is not supported")
        form = _SCALARS[kind]
        size = struct.calcsize(form)
        count = self.count("numbers", size)
        return list(struct.unpack(f"<{count}{form[1]}", self.bytes(count * size)))


def _read(file: Path, cursor: _Cursor) -> Header:
    if cursor.bytes(4) != b"GGUF":
        raise _BrokenError("it does not begin with the letters GGUF")
    version = cursor.scalar("<I")
    if version not in (2, 3):
        raise _BrokenError(f"its version is {version}, and only 2 and 3 in little-endian order are supported")
    tensor_count = cursor.count("tensors", 24)
    metadata: dict[str, Any] = {}
    for _ in range(cursor.count("metadata entries", 13)):
        key = cursor.string()
        if key in metadata:
            raise _BrokenError(f"its metadata has {key} twice")
        metadata[key] = cursor.value(cursor.scalar("<I"))
    found = [_tensor(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1) or alignment > 1 << 20:
        raise _BrokenError(f"general.alignment is {alignment!r}, not a power of two")
    begin, tensors = -(-cursor.at // alignment) * alignment, dict[str, StoredTensor]()
    for name, block, shape, offset in found:
        size = prod(shape) // block.elements * block.size
        if name in tensors:
            raise _BrokenError(f"it has the tensor {name} twice")
        if begin + offset + size > len(cursor.data):
            raise _BrokenError(
                f"the tensor {name} ends at byte {begin + offset + size}, but the file has {len(cursor.data)} bytes: "
                "download it again"
            )
        tensors[name] = StoredTensor(name, block, shape, begin + offset, size)
    return Header(file, metadata, tensors)


def _tensor(cursor: _Cursor) -> tuple[str, Block, tuple[int, ...], int]:
    """Read the description of a tensor: name, block, shape and offset."""
    name, dims = cursor.string(), cursor.scalar("<I")
    if not 1 <= dims <= 4:
        raise _BrokenError(f"the tensor {name!r:.100} has {dims} dimensions")
    shape = tuple(cursor.scalar("<Q") for _ in range(dims))[::-1]
    kind, offset = cursor.scalar("<I"), cursor.scalar("<Q")
    if kind not in BLOCKS:
        known = ", ".join(block.name for block in BLOCKS.values())
        raise _BrokenError(
            f"the tensor {name!r:.100} is stored as {_OTHERS.get(kind, f'type {kind}')}. Only {known} are supported: "
            "choose another file of this model, such as Q4_K_M or Q8_0"
        )
    block = BLOCKS[kind]
    if min(shape) < 1 or shape[-1] % block.elements:
        raise _BrokenError(f"the tensor {name!r:.100} of type {block.name} has the shape {list(shape)}")
    return name, block, shape, offset

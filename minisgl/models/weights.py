"""Fills a model's weights: from safetensors, of which a rank reads only its slices, or with random numbers.

Strict: a tensor that is missing, unknown or of another shape is an error that names it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from minisgl.config import ConfigError
from minisgl.layers.weight_shards import WeightShard, WeightSource, weight_shards_of
from minisgl.models.config import read_json

__all__ = ["Checkpoint", "Dummy", "load_weights"]

_DERIVED = ("rotary_emb.inv_freq",)
"""Endings of tensors that old checkpoints hold although config.json determines them."""


class Checkpoint:
    """The safetensors files of a directory: one ``model.safetensors``, or several with an index.

    Use it as a context manager. ``bytes_read`` counts what was taken from the files. Raises `ConfigError`.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.bytes_read = 0
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        for file, listed in self._list_files().items():
            try:
                handle = self._stack.enter_context(safe_open(file, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{file} can't be read as safetensors: {error}") from None
            held = set(handle.keys())
            if listed is not None and listed - held:
                raise ConfigError(f"{file} lacks tensors that the index says it has: {_some(listed - held)}.")
            for name in held:
                if name in self._files:
                    raise ConfigError(f"{self.path} has the tensor {name} in two files.")
                self._files[name] = handle

    def _list_files(self) -> dict[Path, set[str] | None]:
        """Each file, with the tensors that an index expects in it."""
        if not self.path.is_dir():
            raise ConfigError(f"{self.path} is no directory with weights. A named shape has none: use load=dummy.")
        index = self.path / "model.safetensors.index.json"
        files: dict[Path, set[str] | None] = {}
        if index.is_file():
            for name, file in read_json(index).get("weight_map", {}).items():
                expected = files.setdefault(self.path / file, set())
                assert expected is not None
                expected.add(name)
            missing = [file.name for file in files if not file.is_file()]
            if missing:
                raise ConfigError(f"{self.path} lacks files that its index names: {_some(missing)}.")
        else:
            files = dict.fromkeys(sorted(self.path.glob("*.safetensors")))
        if not files:
            raise ConfigError(f"{self.path} has no *.safetensors file. Convert other formats first, or use load=dummy.")
        return files

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        self._files.clear()

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._files)

    def fill(self, piece: WeightShard) -> None:
        stored = self._files[piece.name].get_slice(piece.name)
        shape = tuple(stored.get_shape())
        if shape != piece.shape:
            raise ConfigError(
                f"{self.path}: the tensor {piece.name} has shape {list(shape)}, config.json makes it "
                f"{list(piece.shape)}."
            )
        if piece.target.numel() == 0:
            return
        part = stored[piece.index]
        self.bytes_read += part.nbytes
        piece.target.copy_(part)


class Dummy:
    """Random weights: normal with a standard deviation of ``std``, but norms are ones.

    A tensor depends on its name, its whole shape, the seed and the kind of device, so that ranks hold slices of the
    same model whatever their number. Each is drawn on the device it belongs to.
    """

    names = None

    def __init__(self, seed: int = 0, std: float = 0.02):
        self.seed, self.std = seed, std

    def fill(self, piece: WeightShard) -> None:
        if piece.name.endswith("norm.weight"):
            piece.target.fill_(1.0)
            return
        digest = hashlib.sha256(f"{self.seed} {piece.name}".encode()).digest()
        generator = torch.Generator(piece.target.device)
        generator.manual_seed(int.from_bytes(digest[:7], "little"))
        dtype, device = piece.target.dtype, piece.target.device
        if piece.target.shape == piece.shape and piece.target.is_contiguous():
            piece.target.normal_(0.0, self.std, generator=generator)
            return
        whole = torch.empty(piece.shape, dtype=dtype, device=device).normal_(0.0, self.std, generator=generator)
        piece.target.copy_(whole[piece.index])


@torch.no_grad()
def load_weights(model: nn.Module, source: WeightSource, tied: Mapping[str, str] = {}) -> None:
    """Fill every weight of ``model`` from ``source``, then let its layers prepare theirs (``after_load``).

    ``tied`` maps a tensor that the model does not have to the one it shares: where a checkpoint holds both, they
    must be equal. Raises `ConfigError` that names what is missing, unknown, mis-shaped or not tied.
    """
    pieces = list(weight_shards_of(model, "", source.names))
    if source.names is not None:
        wanted = {piece.name for piece in pieces}
        missing = wanted - source.names
        unknown = {n for n in source.names - wanted - tied.keys() if not n.endswith(_DERIVED)}
        if missing or unknown:
            problems = [f"lacks {_some(missing)}"] * bool(missing) + [f"also has {_some(unknown)}"] * bool(unknown)
            raise ConfigError(
                f"The checkpoint's tensors are not those of a {type(model).__name__}: it {' and '.join(problems)}."
            )
        for other, name in tied.items():
            if other in source.names:
                pieces += [_comparison(piece, other) for piece in pieces if piece.name == name]
    for piece in pieces:
        source.fill(piece)
        if piece.name in tied:
            _check_tied(piece, next(p for p in pieces if p.name == tied[piece.name]))
    for module in model.modules():
        after_load = getattr(module, "after_load", None)
        if after_load is not None:
            after_load()


def _comparison(piece: WeightShard, name: str) -> WeightShard:
    return WeightShard(name, piece.shape, piece.index, torch.empty_like(piece.target))


def _check_tied(copy: WeightShard, own: WeightShard) -> None:
    if not torch.equal(copy.target, own.target):
        raise ConfigError(
            f"config.json ties {copy.name} to {own.name} (tie_word_embeddings), but the checkpoint holds two "
            "different ones: set tie_word_embeddings to false in config.json to use both."
        )


def _some(names: set[str] | list[str], most: int = 5) -> str:
    shown = sorted(names)[:most]
    return ", ".join(shown) + (f" and {len(names) - most} more" if len(names) > most else "")

"""Loading of a model's weights from safetensors files.

A rank reads only its own slices of the files. Loading is strict: a tensor that is missing, unknown or of a wrong shape
raises an error with its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from minisgl.config import ConfigError
from minisgl.layers.weight_shards import WeightShard, WeightSource, weight_shards_of
from minisgl.models.resolve import some, weight_files

__all__ = ["WIDE", "Checkpoint", "dtype_name", "load_weights"]

WIDE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""The dtypes of weights that are not quantised."""

_DERIVED = "rotary_emb.inv_freq"
"""Name suffix of tensors that are ignored: old checkpoints store them, but config.json determines their values."""

_VALUE_HEAD = "v_head."
"""Name prefix of tensors that are ignored: the value head of reinforcement learning, which generation does not use."""


class Checkpoint:
    """The safetensors files of a directory that `weight_files` chooses.

    Use the checkpoint as a context manager. Raises `ConfigError` if a file is missing or unreadable.

    ``bytes_read`` counts the bytes of the slices read so far. ``beside`` maps the name of a weight to that of a tensor
    which a subclass reads together with it.
    """

    def __init__(self, path: str | Path):
        self.path, self.bytes_read = Path(path), 0
        self.beside: dict[str, str] = {}
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        for file, listed in weight_files(self.path).items():
            try:
                handle = self._stack.enter_context(safe_open(file, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{file} can't be read as safetensors: {error}") from None
            held = set(handle.keys())
            if listed is not None and listed - held:
                raise ConfigError(f"{file} lacks tensors that the index says it has: {some(listed - held)}.")
            for name in held:
                if name in self._files:
                    raise ConfigError(f"{self.path} has the tensor {name} in two files.")
                self._files[name] = handle

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        self._files.clear()

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensors in the files."""
        return frozenset(self._files)

    def fill(self, shard: WeightShard) -> None:
        """Read the shard's slice into its target. Raises `ConfigError` if the stored tensor has another shape."""
        stored = self._files[shard.name].get_slice(shard.name)
        shape = tuple(stored.get_shape())
        if shape != shard.shape:
            raise ConfigError(
                f"{self.path}: the tensor {shard.name} has shape {list(shape)}, but config.json implies "
                f"{list(shard.shape)}."
            )
        if shard.target.numel() == 0:
            return
        part = stored[shard.index]
        self.bytes_read += part.nbytes
        shard.target.copy_(self.converted(shard, part))

    def converted(self, shard: WeightShard, part: Tensor) -> Tensor:
        """Return the slice ``part`` of a stored tensor as the numbers that it stands for: here, as it is.

        Raises `ConfigError` if a copy of ``part`` to the shard's target would change what the numbers mean.
        """
        if part.dtype in WIDE:
            return part
        stored = f"{self.path}: the tensor {shard.name} is stored in {dtype_name(part.dtype)}"
        if part.dtype == torch.float8_e4m3fn:
            raise ConfigError(f"{stored}, but quantization_config of config.json implies a wider dtype.")
        raise ConfigError(f"{stored}, but weights must be in {', '.join(map(dtype_name, WIDE))}.")


@torch.no_grad()
def load_weights(model: nn.Module, source: WeightSource, tied: Mapping[str, str] = {}) -> None:
    """Load every weight of ``model`` from ``source``, then call ``after_load`` of each layer that has it.

    ``tied`` maps the name of a tensor that the model does not store to the name of the tensor that it shares, for
    example the LM head to the embedding. If a checkpoint stores both, they must be equal. Raises `ConfigError` that
    names tensors which are missing, unknown, of a wrong shape, or not equal although they are tied.
    """
    _fill_all(model, source, tied)
    for module in model.modules():
        after_load = getattr(module, "after_load", None)
        if after_load is not None:
            after_load()


def _fill_all(model: nn.Module, source: WeightSource, tied: Mapping[str, str]) -> None:
    """Load every weight: see `load_weights`.

    The shards refer to the memory of all weights, and are dropped at the end of this function. So ``after_load`` of a
    layer can free a weight that it converts.
    """
    shards = list(weight_shards_of(model, "", source.names))
    if source.names is not None:
        for other, name in tied.items():
            if other in source.names and name not in source.names:  # only the other name of a shared tensor is stored
                shards = [replace(shard, name=other) if shard.name == name else shard for shard in shards]
                tied = {key: value for key, value in tied.items() if key != other}
        required = {shard.name for shard in shards}
        missing = required - source.names
        beside = source.beside if isinstance(source, Checkpoint) else {}
        known = required | tied.keys() | {beside[name] for name in required | tied.keys() if name in beside}
        unknown = {n for n in source.names - known if not n.endswith(_DERIVED) and not n.startswith(_VALUE_HEAD)}
        if missing or unknown:
            problems = [f"lacks {some(missing)}"] * bool(missing) + [f"also has {some(unknown)}"] * bool(unknown)
            raise ConfigError(
                f"The checkpoint's tensors are not those of a {type(model).__name__}: it {' and '.join(problems)}."
            )
        for other, name in tied.items():
            if other in source.names:
                shards += [_comparison(shard, other) for shard in shards if shard.name == name]
    for shard in shards:
        shard.load(source)
        if shard.name in tied:
            _check_tied(shard, next(s for s in shards if s.name == tied[shard.name]))


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def _comparison(shard: WeightShard, name: str) -> WeightShard:
    """Return a shard like ``shard`` of the tensor ``name``, read into temporary memory for `_check_tied`."""
    return WeightShard(name, shard.shape, shard.index, torch.empty_like(shard.target))


def _check_tied(copy: WeightShard, own: WeightShard) -> None:
    """Raise `ConfigError` if the two shards of tied tensors differ."""
    if not torch.equal(copy.target, own.target):
        raise ConfigError(
            f"config.json ties {copy.name} to {own.name} (tie_word_embeddings), but in the checkpoint "
            "they differ: set tie_word_embeddings to false in config.json to use both."
        )

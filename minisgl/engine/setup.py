"""What an engine decides before it can run: device, dtype, length, which tokens end a text; and the parts it asks for.

Every contradiction between options, model and machine is found here, before a rank waits for another, and raised as a
`ConfigError` that says what to change.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from minisgl.attention import AttentionBackend
from minisgl.config import Config, ConfigError
from minisgl.layers.context import Context
from minisgl.models.config import ModelConfig, read_json
from minisgl.models.decoder import Model
from minisgl.models.knockout import knock_out
from minisgl.models.resolve import resolve_model
from minisgl.models.weights import Checkpoint, Dummy
from minisgl.plugin_manager.discovery import near

if TYPE_CHECKING:
    from minisgl.plugin_manager.manager import PluginManager

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pick_device(config: Config, rank: int) -> torch.device:
    """``device``, where ``auto`` is CUDA if there is one; rank r computes on the r-th GPU."""
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if config.device not in ("auto", "cuda"):
        raise ConfigError(f"device={config.device} is unknown: use auto, cpu or cuda.")
    if not torch.cuda.is_available():
        raise ConfigError("device=cuda, but torch finds no CUDA device here. Use device=cpu, or install a CUDA torch.")
    if config.tp > torch.cuda.device_count():
        raise ConfigError(f"tp={config.tp} needs as many GPUs; torch finds {torch.cuda.device_count()}.")
    return torch.device("cuda", rank)


def pick_dtype(config: Config, model: ModelConfig, device: torch.device) -> torch.dtype:
    """``dtype``, where ``auto`` is float32 on a CPU and the checkpoint's on a GPU."""
    name = config.dtype
    if name == "auto":
        name = "float32" if device.type == "cpu" else model.dtype
    if name not in DTYPES:
        given = "dtype" if config.dtype != "auto" else "the checkpoint's dtype"
        raise ConfigError(f"{given}={name} is not supported: use dtype={', '.join(DTYPES)}.")
    return DTYPES[name]


def pick_max_len(config: Config, model: ModelConfig) -> int:
    """Tokens that a request may have: ``max_seq_len``, at most the model's."""
    if config.max_seq_len is None:
        return model.max_len
    if not 2 <= config.max_seq_len <= model.max_len:
        raise ConfigError(
            f"max_seq_len={config.max_seq_len} must be between 2 and the {model.max_len} positions of {config.model}."
        )
    return config.max_seq_len


def read_model(config: Config) -> tuple[Path, ModelConfig]:
    """The model's directory (or a named shape's file) and what its config.json says, checked against ``tp``."""
    path = resolve_model(config.model)
    model = ModelConfig.from_dir(path)
    if config.architecture is not None:
        model = replace(model, architecture=config.architecture)
    heads, kv_heads, tp = model.num_attention_heads, model.num_key_value_heads, config.tp
    if heads % tp or (kv_heads % tp and tp % kv_heads):
        good = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
        raise ConfigError(
            f"tp={tp} does not divide the {heads} query and {kv_heads} key-value heads of {config.model}: "
            f"use tp={', '.join(map(str, good))}."
        )
    return path, model


def eos_ids(path: Path) -> frozenset[int]:
    """Token ids that end a text: generation_config.json's, else config.json's."""
    files = [path / "generation_config.json", path / "config.json"] if path.is_dir() else [path]
    for file in files:
        found = read_json(file).get("eos_token_id") if file.is_file() else None
        if found is not None:
            return frozenset(found if isinstance(found, list) else [found])
    return frozenset()


def build_attention(
    config: Config, manager: PluginManager, device: torch.device, dtype: torch.dtype
) -> AttentionBackend:
    """The attention backend, asked whether it can serve these pages and this dtype here."""
    backend: AttentionBackend = manager.build("attention", config.attention, device=device)
    needs = backend.needs()
    name = manager.name_of("attention", config.attention)
    what = f"attention={name}"
    if needs.refuse:
        raise ConfigError(f"{what} can't serve here: {needs.refuse}")
    if "extend" not in needs.phases:
        raise ConfigError(
            f"{what} computes decode rows only, and no prompts: use attention=hybrid attention.decode={name} "
            "attention.prefill=flashinfer (or another backend)."
        )
    if needs.page_sizes is not None and config.page_size not in needs.page_sizes:
        good = ", ".join(map(str, needs.page_sizes))
        raise ConfigError(f"{what} can't serve page_size={config.page_size}: use page_size={good}.")
    if needs.kv_dtypes is not None and dtype not in needs.kv_dtypes:
        good = ", ".join(str(d).removeprefix("torch.") for d in needs.kv_dtypes)
        raise ConfigError(f"{what} can't serve dtype={str(dtype).removeprefix('torch.')}: use dtype={good}.")
    return backend


def build_model(config: Config, manager: PluginManager, path: Path, model: ModelConfig, ctx: Context) -> Model:
    """The model with this rank's weights in it."""
    classes = manager.models()
    if model.architecture not in classes:
        known = f"{near(model.architecture, classes)} Known: {', '.join(sorted(classes))}."
        if config.architecture is not None:
            raise ConfigError(f"architecture={config.architecture}: no plugin has a model class of that name{known}")
        raise ConfigError(f"{config.model} is a {model.architecture}, which no plugin models{known}")
    try:
        built: Model = classes[model.architecture](model, ctx)
    except ValueError as error:
        raise ConfigError(f"{config.model} can't be built: {error}") from error
    if config.knock_out is not None:
        knock_out(built, config.knock_out)
    if config.load == "dummy":
        built.load(Dummy(config.seed))
    else:
        with Checkpoint(path) as weights:
            built.load(weights)
    return built


def largest_step(config: Config, max_len: int) -> int:
    """Tokens that a step with prompts can have at most."""
    most = min(config.max_prefill_tokens, config.max_running_requests * max_len)
    return most if config.num_pages is None else min(most, config.num_pages * config.page_size)


@contextmanager
def room_to_record(config: Config) -> Iterator[None]:
    """Attention's workspace, and what graphs keep of what they compute, lie beside weights and KV."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        less = "memory_ratio" if config.num_pages is None else "num_pages"
        raise ConfigError(
            f"The device has no memory left for attention's workspace and graphs: lower {less} or max_prefill_tokens, "
            f"or use graph=none. ({error})"
        ) from error

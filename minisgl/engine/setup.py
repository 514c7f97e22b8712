"""Decisions and checks at engine start: device, dtype, maximum length, attention backend, model, size of the KV pool.

Contradictions between options, model and machine are found here, before any rank waits for another rank. Each is raised
as a `ConfigError` that says what to change.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from minisgl.attention import AttentionBackend
from minisgl.config import Config, ConfigError
from minisgl.core import EngineSpec
from minisgl.layers.context import Context
from minisgl.models.config import HOW_TO_ADD, ModelConfig
from minisgl.models.converter import ModelConverter, load_converted
from minisgl.models.decoder import Model
from minisgl.models.resolve import resolve_model
from minisgl.models.weights import Checkpoint

if TYPE_CHECKING:
    from minisgl.plugin_manager.manager import PluginManager

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(config: Config, local_rank: int = 0, local_size: int | None = None) -> torch.device:
    """Return the device of a rank: the CPU, or GPU number ``local_rank``. ``device=auto`` is CUDA if torch finds a GPU.

    The rank has the number ``local_rank`` among the ``local_size`` ranks of this machine, by default all ``tp`` ranks.
    Raises `ConfigError` if this machine has too few GPUs.
    """
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if config.device not in ("auto", "cuda"):
        raise ConfigError(f"device={config.device} is unknown: use auto, cpu or cuda.")
    if not torch.cuda.is_available():
        raise ConfigError(
            "device=cuda, but torch finds no CUDA device here. Use device=cpu, or install a torch build with CUDA."
        )
    needed, found = config.tp if local_size is None else local_size, torch.cuda.device_count()
    if needed > found:
        here = "" if needed == config.tp else " on this machine"
        raise ConfigError(f"tp={config.tp} needs {needed} GPUs{here}, but torch finds {found}.")
    return torch.device("cuda", local_rank)


def resolve_dtype(config: Config, model: ModelConfig, device: torch.device) -> torch.dtype:
    """Return the dtype of weights and KV. ``dtype=auto`` is float32 on a CPU and the checkpoint's dtype on a GPU."""
    name = config.dtype
    if name == "auto":
        name = "float32" if device.type == "cpu" else model.dtype
    if name not in DTYPES:
        given = "dtype" if config.dtype != "auto" else "the checkpoint's dtype"
        raise ConfigError(f"{given}={name} is not supported: use dtype={', '.join(DTYPES)}.")
    return DTYPES[name]


def resolve_max_seq_len(config: Config, model: ModelConfig) -> int:
    """Return the maximum number of tokens of a request: ``max_seq_len`` if given, else the model's maximum."""
    why = model.rope.why_no_longer and f" {model.rope.why_no_longer}"
    if config.max_seq_len is None:
        if why:
            log.warning("%s serves requests of at most %d tokens.%s", config.model, model.max_len, why)
        return model.max_len
    if not 2 <= config.max_seq_len <= model.max_len:
        raise ConfigError(
            f"max_seq_len={config.max_seq_len} must be between 2 and the {model.max_len} positions of "
            f"{config.model}.{why}"
        )
    return config.max_seq_len


def read_model(config: Config, manager: PluginManager) -> tuple[Path, ModelConfig]:
    """Return the path of the model and its configuration from config.json.

    The path is a directory, or the JSON file of a built-in model shape. Raises `ConfigError` if ``tp`` does not divide
    the query heads, or if of ``tp`` and the number of KV heads neither divides the other.
    """
    path = resolve_model(config.model)
    manager.load_all("models")
    model = ModelConfig.from_dir(path, manager.hook.minisgl_read_config)
    if config.architecture is not None:
        model = replace(model, architecture=config.architecture)
    heads, kv_heads, tp = model.num_attention_heads, model.num_key_value_heads, config.tp
    if heads % tp or (kv_heads % tp and tp % kv_heads):
        valid = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
        raise ConfigError(
            f"tp={tp} does not divide the {heads} query and {kv_heads} key-value heads of {config.model}: "
            f"use tp={', '.join(map(str, valid))}."
        )
    return path, model


def build_attention(
    config: Config, manager: PluginManager, device: torch.device, dtype: torch.dtype
) -> AttentionBackend:
    """Build the attention backend. Raises `ConfigError` if it cannot serve this device, page size or dtype."""
    backend: AttentionBackend = manager.build("attention", config.attention, device=device)
    needs = backend.needs()
    name = manager.name_of("attention", config.attention)
    what = f"attention={name}"
    if needs.refuse:
        raise ConfigError(f"{what} can't serve here: {needs.refuse}")
    if "extend" not in needs.phases:
        raise ConfigError(
            f"{what} computes decode rows only, not prompts: use attention=hybrid attention.decode={name} "
            "attention.prefill=flashinfer (or another backend)."
        )
    if needs.page_sizes is not None and config.page_size not in needs.page_sizes:
        valid = ", ".join(map(str, needs.page_sizes))
        raise ConfigError(f"{what} can't serve page_size={config.page_size}: use page_size={valid}.")
    if needs.kv_dtypes is not None and dtype not in needs.kv_dtypes:
        valid = ", ".join(str(d).removeprefix("torch.") for d in needs.kv_dtypes)
        raise ConfigError(f"{what} can't serve dtype={str(dtype).removeprefix('torch.')}: use dtype={valid}.")
    return backend


def build_model(
    config: Config,
    manager: PluginManager,
    path: Path,
    model: ModelConfig,
    ctx: Context,
    kernels: Sequence[ModelConverter] = (),
) -> tuple[Model, list[ModelConverter]]:
    """Build the model and load this rank's weights. First converters of plugins, then ``kernels`` convert it.

    Returns the model and all converters. Raises `ConfigError` if no plugin has the architecture, or if its model class
    rejects the configuration.
    """
    classes = manager.models()
    causal = f"{model.architecture.removesuffix('Model')}ForCausalLM"
    if model.architecture not in classes and causal in classes:  # the base model was saved, without its LM head
        model = replace(model, architecture=causal)
    if model.architecture not in classes:
        known = f"Known: {', '.join(sorted(classes))}. {HOW_TO_ADD}"
        if config.architecture is None:
            raise ConfigError(f"{config.model} is a {model.architecture}, which no plugin implements. {known}")
        name, stems = model.architecture, {full.removesuffix("ForCausalLM"): full for full in classes}
        # All names end alike, and a name that is not a typing error must not lead to another model.
        close = difflib.get_close_matches(name.removesuffix("ForCausalLM"), stems, n=1, cutoff=0.87)
        guess = f" Did you mean {stems[close[0]]}?" if close else ""
        raise ConfigError(f"architecture={name}: no plugin has a model class of that name.{guess} {known}")
    found = manager.hook.minisgl_convert_model(config=config, manager=manager, model=model, ctx=ctx)
    converters = [*found, *kernels]
    kind = classes[model.architecture]
    try:
        manager.hook.minisgl_check_model(model=kind, config=model)
        built: Model = kind(model, ctx)
    except ValueError as error:
        raise ConfigError(f"{config.model} can't be built: {error}") from error
    opened = (source for converter in converters if (source := converter.open(path)) is not None)
    with next(opened, None) or Checkpoint(path) as weights:
        load_converted(built, weights, converters)
    return built, converters


def max_step_tokens(config: Config, max_seq_len: int) -> int:
    """Return the maximum number of tokens of a step with prompts."""
    limit = min(config.max_prefill_tokens, config.max_running_requests * max_seq_len)
    return limit if config.num_pages is None else min(limit, config.num_pages * config.page_size)


@contextmanager
def explain_out_of_memory(config: Config) -> Iterator[None]:
    """Turn an out-of-memory error of the body into a `ConfigError` that names the option to lower.

    The body allocates the workspace of attention and the memory of the graphs, which must fit beside weights and KV.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        option = "memory_ratio" if config.num_pages is None else "num_pages"
        raise ConfigError(
            f"The device has no memory left for attention's workspace and graphs: lower {option} or "
            f"max_prefill_tokens, or use graph=none. ({error})"
        ) from error


CPU_SHARE, CPU_LIMIT = 0.1, 4 << 30
"""Limits of the KV pool on a CPU: a share of the machine's memory, and a number of bytes. The smaller limit applies.
``memory_ratio`` applies to GPUs only."""


def size_pool(config: Config, page_bytes: int, spec: EngineSpec, device: torch.device, reserved: int) -> int:
    """Return the number of pages of the KV pool, not counting the scratch page.

    ``page_bytes`` is the size of one page on this rank, and ``spec`` has all other sizes. ``reserved`` is a number of
    bytes that are left free, for what is allocated later: the workspace of the attention backend, the page table and
    the state of the sampler. If ``num_pages`` is not given, the result is at most the number of pages that
    ``max_running_requests`` requests of ``max_seq_len`` tokens can fill.

    Raises `ConfigError` if the pool would hold fewer than 2 tokens, or if the option ``max_seq_len`` is given and a
    request of that length does not fit.
    """
    size, max_len, request_pages = config.page_size, spec.max_seq_len, spec.pages_of(spec.num_columns)
    if config.num_pages is not None:
        pages, why = config.num_pages, f"num_pages={config.num_pages}"
    else:
        available, why = _available_bytes(config, device, reserved)
        usable_pages = config.max_running_requests * request_pages
        pages = min(available // page_bytes - 1, usable_pages)  # one page is the scratch page
    if pages * size < 2:
        raise ConfigError(
            f"No KV pool fits: {why} leaves {max(pages, 0)} pages of {size} tokens, {page_bytes / 2**20:.1f} MiB each. "
            "Raise num_pages or memory_ratio, or choose a smaller model or dtype."
        )
    if config.max_seq_len is not None and pages < request_pages:
        raise ConfigError(
            f"max_seq_len={max_len} needs {request_pages} pages of {size} tokens for one request, but "
            f"{why} leaves {pages}. Lower max_seq_len, or raise num_pages or memory_ratio."
        )
    return pages


def _available_bytes(config: Config, device: torch.device, reserved: int) -> tuple[int, str]:
    """Return the bytes available for KV, and the option or rule that determines this number, for error messages."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        used = total - free  # includes the weights, which are loaded before the pool is sized
        return int(config.memory_ratio * total) - used - reserved, f"memory_ratio={config.memory_ratio}"
    total = psutil.virtual_memory().total
    share = min(int(CPU_SHARE * total), CPU_LIMIT)
    return share - reserved, f"{CPU_SHARE} of this machine's memory (at most {CPU_LIMIT >> 30} GiB)"

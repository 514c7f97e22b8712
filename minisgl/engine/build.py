"""Construction of the engine of one rank from a `Config`: model, weights, KV pool, attention, communicator, runner.

Every process that computes calls `build_engine`; a program whose own process is rank 0, such as that of an ``LLM``,
calls `start_engine`. The decisions that options, model and machine leave are in `minisgl.engine.setup`. Sockets, pipes
and the supervision of processes are left to the callers.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from minisgl.attention import AttentionBackend
from minisgl.config import GROUPS, Config, ConfigError
from minisgl.core import EngineSpec
from minisgl.distributed import Communicator
from minisgl.engine import setup
from minisgl.engine.engine import TorchEngine
from minisgl.engine.model_runner import ModelRunner, StepRunner
from minisgl.engine.sampler import state_bytes
from minisgl.kvcache.pool import KVPool
from minisgl.layers.context import Context
from minisgl.models.converter import Kernels
from minisgl.models.decoder import Model
from minisgl.models.generation_config import eos_ids
from minisgl.plugin_manager.encoding import early_functions, started_early

if TYPE_CHECKING:
    from minisgl.plugin_manager.manager import PluginManager

log = logging.getLogger(__name__)


def start_engine(config: Config, manager: PluginManager) -> TorchEngine:
    """Build rank 0's engine in this process, and have the other ranks started if there are any (`minisgl_start_ranks`).

    Closing the returned engine ends them. Raises `ConfigError` for options that do not fit, and `EngineDeadError` if a
    rank exits during start.
    """
    if config.tp == 1:
        return build_engine(config, manager)
    manager.load_built_in("ranks", "children")
    engine: TorchEngine | None = manager.hook.minisgl_start_ranks(config=config, manager=manager)
    if engine is None:
        raise ConfigError(f"tp={config.tp} needs the plugin plugins/ranks/children, which is missing.")
    return engine


def build_engine(
    config: Config,
    manager: PluginManager,
    rank: int = 0,
    size: int = 1,
    address: str = "",
    *,
    local_rank: int | None = None,
    local_size: int | None = None,
) -> TorchEngine:
    """Build the engine of one tensor-parallel rank, and compute the steps with which its runner warms up.

    ``size`` is the number of ranks. ``address`` is ``host:port`` of rank 0's rendezvous; at ``size`` 1 it may be empty.
    With several ranks the call blocks until all ranks have connected, so the caller must start the other ranks before
    or while it builds rank 0. It then gives rank 0's engine its `TorchEngine.peers`. ``local_size`` of the ranks are on
    this machine, where this rank has the number ``local_rank``; by default all of them are. With several ranks on a
    machine, torch uses at most cores // ``local_size`` threads (at least 1) in this process. On GPUs, a rank uses GPU
    number ``local_rank``, and makes it the current CUDA device of this thread.

    Raises `ConfigError` if options contradict each other, the model or the machine.
    """
    local_rank = rank if local_rank is None else local_rank
    local_size = size if local_size is None else local_size
    parts = [getattr(config, group) for group in GROUPS]
    with started_early(early_functions(*parts), config.device, config.tp):
        device = setup.resolve_device(config, local_rank, local_size)
        if local_size > 1:
            _limit_threads(local_size)
        if local_rank > 0 and device.type == "cuda":
            # Kernels and pinned memory that name no device use the current one, which is the first GPU by default.
            torch.cuda.set_device(device)
        kernels = Kernels()
        if config.kernels is not None:
            kernels = manager.build("kernels", config.kernels, device=device)
        engine = _assemble(config, manager, kernels, rank, size, local_size, address, device)
        engine.kernels = kernels
        engine.start(config)
        drafting = manager.name_of("speculation", config.speculation) not in ("none", "null")
        if engine.graph is not None:
            engine.graph.warm_up(engine, config, drafting=drafting)
        kernels.ready()
        return engine


def _assemble(
    config: Config,
    manager: PluginManager,
    kernels: Kernels,
    rank: int,
    size: int,
    local_size: int,
    address: str,
    device: torch.device,
) -> TorchEngine:
    """Build the parts of an engine, load the weights, and then allocate the KV pool in the memory that is left."""
    manager.load_for_options(config)
    path, model_config = setup.read_model(config, manager)
    dtype = setup.resolve_dtype(config, model_config, device)
    max_seq_len = setup.resolve_max_seq_len(config, model_config)
    eos = eos_ids(path)
    attention = setup.build_attention(config, manager, device, dtype)
    if (wrap := getattr(config.cache, "wrap_attention", None)) is not None:
        attention = wrap(config, device, attention, lambda: setup.build_attention(config, manager, device, dtype))
    ranks: dict[str, Any] = {"rank": rank, "size": size, "address": address, "device": device}
    comm = Communicator()
    if config.communicator is not None:
        comm = manager.build("communicator", config.communicator, local_size=local_size, **ranks)
    elif size > 1:
        raise ConfigError(f"tp={size} needs a plugin of the group communicator, and there is none.")

    @functools.cache
    def part(group: str) -> Any:
        if (options := getattr(config, group)) is None:
            raise ConfigError(f"{config.model} needs a part of the group {group}, and there is no plugin of it.")
        return manager.build(group, options, device=device)

    graph = None if config.graph is None else manager.build("graph", config.graph, device=device)
    max_step_tokens = setup.max_step_tokens(config, max_seq_len)
    wrapped = attention if graph is None else graph.wrap_attention(attention, max_step_tokens)
    ctx = Context(comm, wrapped, device, dtype, part)
    started = time.monotonic()
    log.info("loading weights of %s (%s, %s) from %s", model_config.architecture, dtype, device, path)
    model, converters = setup.build_model(config, manager, path, model_config, ctx, [kernels])
    log.info("loaded weights in %.1f s", time.monotonic() - started)
    if isinstance(model, torch.nn.Module):
        for converter in converters:
            converter.prepare(model, max(max_step_tokens, config.max_running_requests))

    manager.load_all("sampling")
    manager.load_built_in("speculation", "verification")
    vocab_size = model_config.vocab_size
    wrappers = manager.hook.minisgl_wrap_runner(
        config=config, max_seq_len=max_seq_len, vocab_size=vocab_size, device=device
    )
    spec = _allocate_pool(config, manager, model, attention, ctx, max_seq_len, vocab_size, rank)
    model_runner = ModelRunner(model, attention, ctx, spec, max_step_tokens=max_step_tokens, rank=rank, size=size)
    kernels.convert_sampler(model_runner.sampler)
    runner: StepRunner = model_runner if graph is None else graph.wrap(model_runner)
    for wrap in wrappers:
        runner = wrap(runner, model_runner)
    return TorchEngine(model_runner, runner, graph, eos)


def _allocate_pool(
    config: Config,
    manager: PluginManager,
    model: Model,
    attention: AttentionBackend,
    ctx: Context,
    max_seq_len: int,
    vocab_size: int,
    rank: int,
) -> EngineSpec:
    """Allocate the KV pool: as many pages as the options say or as fit, on all ranks. Return the engine's sizes."""
    layers, needs = model.attention_layers(), attention.needs()
    if not needs.sinks and any(layer.sinks is not None for layer in layers):
        raise ConfigError(
            f"The layers of {config.model} have attention sinks, which the attention backend "
            f"{type(config.attention).__name__.lower()} does not compute here: use attention=torch."
        )
    groups, depth = attention.group_layers(layers)
    rows = config.max_running_requests
    if (allocate_states := getattr(model, "allocate_states", None)) is not None:
        ctx.states = allocate_states(config, manager)
    spec = EngineSpec(config.page_size, 0, rows, max_seq_len, vocab_size, groups, bool(ctx.states))
    shape = (depth, config.page_size, layers[0].kv_heads, layers[0].head_dim)
    reserved = needs.workspace + _state_bytes(spec, rank)
    pages = setup.size_pool(config, KVPool.page_bytes(*shape, ctx.dtype), spec, ctx.device, reserved)
    pages = min(int(n) for n in ctx.comm.exchange(str(pages).encode()))  # page numbers must be valid on all ranks
    spec = replace(spec, num_pages=pages)
    ctx.pool = KVPool(shape[0], pages + 1, *shape[1:], ctx.dtype, ctx.device, needs.layout)
    tokens, gib = pages * config.page_size, ctx.pool.nbytes / 2**30
    note = "; memory is committed as it is first used" if ctx.device.type == "cpu" else ""
    log.info("KV pool: %d pages of %d tokens (%d tokens, %.2f GiB%s)", pages, config.page_size, tokens, gib, note)
    return spec


def _state_bytes(spec: EngineSpec, rank: int) -> int:
    """Return the bytes of device memory for the page table and for sampling. Only rank 0 samples."""
    rows = spec.max_running_requests
    sampling = state_bytes(rows, spec.vocab_size) if rank == 0 else 0
    return (rows + 1) * (8 + 4 * len(spec.groups) * spec.num_columns) + sampling


def _limit_threads(size: int) -> None:
    """Limit torch's threads to this rank's share of the cores: at most ``cores // size``, at least 1.

    If each of ``size`` ranks on one machine used all cores, the ranks' threads would compete and slow each other down.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, min(torch.get_num_threads(), cores // size)))

"""Every hook of minisgl: the functions that a plugin can implement, each marked with ``@hookimpl``.

A hook is a function of the plugin's module, or a method of a class in the module. The plugin manager of each engine
makes one object of such a class, without arguments, so the state of an observer belongs to one engine. An
implementation may leave out arguments that it does not use.

*Observers* are told of events. All implementations of an event are called, in rank 0's process, between two steps or
once per step, and never per layer. An observer may read its arguments, but must not change them. Rank 0's process is
``scheduler-0`` of a server, or that of the caller with `LLM`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    import torch

    from minisgl.config import Config
    from minisgl.core import I32, EngineSpec, Req, Step, StepResult
    from minisgl.engine.engine import TorchEngine
    from minisgl.layers.context import Context
    from minisgl.message.link import Link
    from minisgl.models.config import ModelConfig
    from minisgl.models.converter import ModelConverter
    from minisgl.plugin_manager.manager import PluginManager
    from minisgl.server.extension import HttpExtension
    from minisgl.tokenizer.tokenizer import Tokenizer

PROJECT = "minisgl"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


# ---- parts of an engine, its model, and the API server ---------------------------------------------------


@hookspec
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    """Register parts of an engine: attention backends, caches, policies and so on, each by its options.

    When: in every process, once, when the process loads the plugin: before it composes or decodes a `Config`.

    Returns: tuples ``(group, name, dataclass)``. ``group=name`` on the command line then selects this dataclass, and
    its fields are options of the group. Its method ``build`` returns the part: ``def build(self): return MyPolicy()``.
    ``build`` may take any argument that its group offers (`plugins/external/parts.py`), by name. It may raise
    ValueError or `ConfigError` for values that don't fit. If the part has a method ``metrics``, the server exports what
    it returns, as for `minisgl_metrics`. The class attribute ``early_context`` may name a function that starts
    something before torch is imported: `minisgl.plugin_manager.encoding`.
    """
    raise NotImplementedError


@hookspec
def minisgl_http(config: Config) -> HttpExtension | None:
    """Build an extension of the API server, which may add routes, middleware, metrics and limits.

    When: once in the API server's process, while the worker processes start. All plugins are called. Import FastAPI and
    the like inside this hook, because every process of the server imports the plugin.

    - ``config``: all options.

    Returns: a `minisgl.server.extension.HttpExtension`. None: no extension, at no cost.
    """


@hookspec(firstresult=True)
def minisgl_find_model(name: str) -> Path | None:
    """Find the model that the option ``model`` names, if it is not in a directory of safetensors files.

    When: in each process that needs the model's files, at start, if no model of that name ships with minisgl. The
    plugins of ``plugins/sources`` and ``plugins/quantization/sources`` and the installed plugins are called; those that
    ``plugins=`` names are not. Most of the processes must not import torch. Several processes may call it at once.

    - ``name``: the value of the option.

    Returns: a directory with the files of a Hugging Face checkpoint, or a file of which another plugin makes one. The
    directory's config.json may have a ``quantization_config``, which selects the part that reads the weights. None: the
    plugin does not know the name. Raise `ConfigError` if it does, and the model can't be used.
    """


@hookspec(firstresult=True)
def minisgl_read_config(raw: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Give the content of a model's config.json the layout that `minisgl.models.config.ModelConfig` reads.

    When: once in each rank's process, before the model's class is chosen, until a plugin returns something.

    - ``raw``: the content of config.json, which the plugin must not change.

    Returns: the fields of a decoder, with ``architectures``. None: as it is. Raise `ConfigError` for a wrong value.
    """


@hookspec
def minisgl_models() -> Mapping[str, type]:
    """Register model classes.

    When: once in each rank's process, at start, when the model is built. All plugins are called.

    Returns: architecture name → model class. The name is compared with ``architectures`` in the checkpoint's
    ``config.json``, or with the option ``architecture``. Two plugins must not register the same name.
    """
    raise NotImplementedError


@hookspec
def minisgl_check_model(model: type, config: ModelConfig) -> None:
    """Refuse a checkpoint that its model class would compute wrongly: raise `ConfigError`, which says why.

    When: once in each rank's process, at start, before the model is built. All plugins are called.

    - ``model``: the model class.
    - ``config``: the model's config.json. `minisgl.models.config.ModelConfig.raw` has all of its fields.
    """


@hookspec
def minisgl_convert_model(
    config: Config, manager: PluginManager, model: ModelConfig, ctx: Context
) -> ModelConverter | None:
    """Change modules of the model from outside: for example, swap the class of some layers.

    When: once in each rank's process, at start, just before the model is built. All plugins are called. Their
    converters are called before those of the groups ``quantization`` and ``kernels``, which leave changed layers as
    they are.

    - ``config``: all options.
    - ``manager``: the plugins of this process.
    - ``model``: the model's config.json.
    - ``ctx``: device, dtype and parts of the engine.

    Returns: a `minisgl.models.converter.ModelConverter`. None: no conversion.
    """


@hookspec(firstresult=True)
def minisgl_cache_manager() -> Callable[..., Any] | None:
    """Choose what moves KV pages between the page allocator, the prefix cache and the page table.

    When: once in rank 0's process, at start, with the scheduler. `minisgl.plugins.cache.prefix` is called last.

    Returns: a function ``make_manager(spec, cache, events)``: see `minisgl.plugins.cache.base`. None: another's.
    """


@hookspec
def minisgl_wrap_policy(config: Config) -> Callable[..., Any] | None:
    """Wrap the scheduling policy, to change its plans or to keep a promise whatever it plans.

    When: once in rank 0's process, at start, when the scheduler is built. All plugins are called. The wrapper of the
    plugin that was loaded last is the outermost one: it is `minisgl.plugins.scheduler.guard`, which keeps promise 6.

    - ``config``: all options.

    Returns: a function ``wrap(policy)``, which returns a `minisgl.scheduler.SchedulerPolicy`. A policy that wraps
    another one passes on its optional members: see there. None: the policy stays as it is.
    """


@hookspec
def minisgl_wrap_constraint(
    req: Req, vocab_size: int, eos_ids: frozenset[int], tokenizer: Tokenizer | None
) -> Callable[..., Any] | None:
    """Restrict the tokens that a request may sample. Raise `InvalidRequestError` to refuse the request.

    When: once per request, in rank 0's process, before the request waits. All plugins are called.

    - ``req``: the request.
    - ``vocab_size``: the number of tokens of a mask.
    - ``eos_ids``: the end-of-sequence token ids.
    - ``tokenizer``: the model's tokenizer. None: it has none.

    Returns: a function ``wrap(constraint)``, which returns a `minisgl.plugins.constraint.base.Constraint`. Its argument
    is the constraint of the request's grammar, or None. None: the tokens stay as they are.
    """


@hookspec
def minisgl_wrap_runner(
    config: Config, max_seq_len: int, vocab_size: int, device: torch.device
) -> Callable[..., Any] | None:
    """Wrap the runner of steps of a rank, to compute steps in another way or to compute more in them.

    When: once in each rank's process, at start, after the weights are loaded and before the KV pool is allocated: what
    the hook allocates on the device now, the pool leaves free. All plugins are called.

    - ``config``: all options.
    - ``max_seq_len``: the largest number of tokens of a request.
    - ``vocab_size``: the number of tokens of the model's vocabulary.
    - ``device``: the device of this rank.

    Returns: a function ``wrap(runner, model_runner)``, which is called when the KV pool exists, and returns a
    `minisgl.engine.model_runner.StepRunner` of the same steps with the same results, or ``runner`` itself: the rank's
    `ModelRunner`, ``model_runner``, or what the group ``graph`` has around it. None: the runner stays as it is.
    """


@hookspec(firstresult=True)
def minisgl_start_ranks(config: Config, manager: PluginManager) -> TorchEngine | None:
    """Start all ranks of an engine whose rank 0 is in this process, as with `LLM`. A server starts its ranks itself.

    When: once, at start, in the process of `LLM`, if ``tp`` is above 1. The first plugin that does not return None
    starts them. `minisgl.plugins.ranks.children`, which starts child processes, is called last.

    - ``config``: all options.
    - ``manager``: the plugins of this process.

    Returns: rank 0's engine (`minisgl.engine.build.build_engine`), with its ``peers`` set (`minisgl.engine.ranks`).
    """


@hookspec
def minisgl_observer(config: Config, spec: EngineSpec, link: Link | None) -> object | None:
    """Build an observer that needs options or the sizes of the engine.

    When: once in rank 0's process, at start, after the engine and just before the scheduler is built. All plugins are
    called. The plugin manager makes no objects of the classes of a module with this hook.

    - ``config``: all options.
    - ``spec``: the sizes of the engine: pages, page size, running requests, sequence length, vocabulary.
    - ``link``: exchanges messages with an extension of the API server (`minisgl.message.link`). None without a server.

    Returns: an object with observer hooks as methods, called until `minisgl_closed`. None: no observer, at no cost.
    """


# ---- observers -------------------------------------------------------------------------------------------


@hookspec
def minisgl_request_added(req: Req, now: float) -> None:
    """Observe a request that was accepted and entered the waiting queue.

    When: once per request, before the request's first step. Not called for a request that is rejected.

    - ``req``: the request.
    - ``now``: the scheduler's clock, in seconds. All hooks with ``now`` use the same monotonic clock.
    """


@hookspec
def minisgl_prefix_matched(req: Req, pages: I32, step: int) -> None:
    """Observe the cached prefix of a request that is being admitted.

    When: once per admission, after `minisgl_batch_planned`. The cached prefix has been locked for the request; the
    request has no pages of its own yet. A request that was retracted is admitted again, so it may be called again.

    - ``req``: the request.
    - ``pages``: pages of the cached prefix in order, int32 ``[pages]``; empty if nothing is cached.
    - ``step``: number of the step that admits the request.
    """


@hookspec
def minisgl_request_retracted(req: Req, step: int) -> None:
    """Observe a running request that was retracted (vLLM: preempted) because KV pages ran out.

    When: once per retraction, after the request's pages were retired. The request waits again and keeps its output.

    - ``req``: the request.
    - ``step``: number of the next step to be launched.
    """


@hookspec
def minisgl_request_finished(req: Req, now: float) -> None:
    """Observe a request that has ended.

    When: once per request, with its final reply. Its pages have been retired, except after an engine failure.

    - ``req``: the request. ``req.finish_reason`` is ``stop``, ``length``, ``abort`` or ``error``.
    - ``now``: the scheduler's clock, in seconds.
    """


@hookspec
def minisgl_pages_allocated(step: int, owners: I32, pages: I32) -> None:
    """Observe the KV pages that were allocated to requests for one step.

    When: at most once per step, after the step's admissions and before `minisgl_batch_scheduled`.

    - ``step``: number of the step that is being built.
    - ``owners``: uid of the request that owns each page, int32 ``[pages]``.
    - ``pages``: the allocated pages, int32 ``[pages]``.
    """


@hookspec
def minisgl_pages_cached(step: int, req: Req, pages: I32, start: int, cached_pages: I32) -> None:
    """Observe the insertion of a request's pages into the prefix cache.

    When: after the launch of a step that completes pages of a prompt, and before a request ends or is retracted.

    - ``step``: number of the last launched step.
    - ``req``: the request that offered its pages.
    - ``pages``: pages whose owner changes from the request to the cache, int32 ``[pages]``.
    - ``start``: the request's page number from which ``cached_pages`` apply.
    - ``cached_pages``: the cache's pages for the request's pages from ``start`` on, int32 ``[pages]``, all locked for
      the request. An entry that is not in ``pages`` was cached before: the request's own page is a duplicate and is
      retired next.
    """


@hookspec
def minisgl_pages_evicted(step: int, pages: I32) -> None:
    """Observe the eviction of pages from the prefix cache.

    When: just before an allocation for which too few pages are free, and when the cache is emptied. They are free now.

    - ``step``: number of the step that is being built.
    - ``pages``: the evicted pages, int32 ``[pages]``.
    """


@hookspec
def minisgl_pages_freed(step: int, owner: int, pages: I32) -> None:
    """Observe the pages that a request retired: it ended, was retracted, or had duplicates of cached pages.

    When: just before the pages are retired.

    - ``step``: number of the last launched step. The pages become free once its result has been read.
    - ``owner``: uid of the request.
    - ``pages``: the retired pages, int32 ``[pages]``.
    """


@hookspec
def minisgl_pages_counted(step: int, free: int, cached: int, evictable: int, retiring: int) -> None:
    """Observe how many KV pages are in each state. Running requests own all pages that are not counted here.

    When: at the end of every turn of the scheduler's loop.

    - ``step``: number of the next step to be launched.
    - ``free``: number of free pages.
    - ``cached``: number of pages that the prefix cache owns.
    - ``evictable``: how many of the cached pages are not locked by a request.
    - ``retiring``: number of pages that become free once the results of launched steps have been read.
    """


@hookspec
def minisgl_batch_planned(step: int, rows: Sequence[tuple[int, int]]) -> None:
    """Observe the plan of a step.

    When: once per step, after the scheduler checked the plan and before it admits requests and allocates pages.

    - ``step``: number of the step.
    - ``rows``: (uid, number of tokens to compute) of each row.
    """


@hookspec
def minisgl_batch_scheduled(step: Step, reqs: Sequence[Req], now: float) -> None:
    """Observe a step that is complete and about to be launched.

    When: once per step, just before the engine launches it.

    - ``step``: the step.
    - ``reqs``: the request of each row of the step.
    - ``now``: the scheduler's clock, in seconds.
    """


@hookspec
def minisgl_step_finished(result: StepResult, reqs: Sequence[Req | None], now: float) -> None:
    """Observe the result of a step. With overlap scheduling, the next step has been launched already.

    When: once per step, after its result was read and its tokens were added to the requests.

    - ``result``: the sampled tokens. ``result.id`` is the number of the step. ``result.accepted[i]`` is the number of
      tokens of row i that count: 1, or more in a row that verified draft tokens.
    - ``reqs``: for each row, the request that gained the row's tokens. None if no request gained them: the row is a
      chunk that does not end its prompt, or the request ended or was retracted meanwhile.
    - ``now``: the scheduler's clock, in seconds.
    """


@hookspec
def minisgl_metrics() -> str:
    """Export the metrics of an observer.

    When: at every ``GET /metrics``, between two turns of the scheduler's loop.

    Returns: metrics in Prometheus' text format, at most 1 MiB. The server adds them to its own. If the hook raises an
    exception, or returns something else, the server logs this once and leaves out the metrics of this observer.
    """
    raise NotImplementedError


@hookspec
def minisgl_closed() -> None:
    """Write out and close what the observer holds open: no other hook is called any more.

    When: once, when the scheduler has ended, with or without an error.
    """

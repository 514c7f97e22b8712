"""Builds rank 0's scheduler from a `Config`: with the cache, policy, drafts and observers that the options name."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from minisgl.config import ConfigError
from minisgl.core import Engine, InvalidRequestError, Req, SamplingParams
from minisgl.plugin_manager.discovery import exists
from minisgl.scheduler.observer import HookObserver
from minisgl.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from minisgl.config import Config
    from minisgl.message.link import Link
    from minisgl.plugin_manager.manager import PluginManager
    from minisgl.tokenizer.tokenizer import Tokenizer


PARAMETER_PLUGINS = {
    **dict.fromkeys(("min_tokens", "bad_words", "allowed_token_ids"), ("constraint", "token_rules")),
    **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), ("sampling", "penalties")),
    "logit_bias": ("sampling", "logit_bias"),
    **dict.fromkeys(("top_k", "top_p"), ("sampling", "top_k_p")),
    "min_p": ("sampling", "min_p"),
    "logprobs": ("sampling", "logprobs"),
    "prompt_logprobs": ("sampling", "prompt_logprobs"),
}
"""Field of `SamplingParams` → the plugin, a kind and a name, without which a request with the field is refused."""
NOT_IF_GREEDY = ("top_k", "top_p", "min_p")
"""Fields that change nothing if a request is greedy."""
_DEFAULT = SamplingParams()


class RankZeroEngine(Engine, Protocol):
    """The engine of rank 0, which also knows the end-of-sequence token ids in the model's configuration."""

    eos_ids: frozenset[int]


def build_scheduler(
    config: Config,
    manager: PluginManager,
    engine: RankZeroEngine,
    clock: Callable[[], float] = time.monotonic,
    *,
    tokenizer: Tokenizer | None = None,
    grammars: Any = None,
    proposer: Any = None,
    adapt_drafts: bool = True,
    link: Link | None = None,
) -> Scheduler:
    """Build rank 0's scheduler for ``engine``, with the cache, the policy and the proposer that ``config`` names.

    The observers of ``manager`` receive the scheduler's events until ``manager.close()`` is called. ``clock`` returns
    seconds. The end-of-sequence ids of ``tokenizer`` are added to those of the engine. ``grammars`` reads the grammars
    of requests (`minisgl.plugins.grammar.lazy`); without it, a request with a grammar is refused. A benchmark may pass
    another ``proposer`` of drafts (`plugins/speculation`), and turn off the adaptation of their number. ``link``
    connects the observers with a server.
    """
    manager.observe(config, engine.spec, link)
    cache = manager.build("cache", config.cache, page_size=engine.spec.page_size, spec=engine.spec)
    if not hasattr(cache, "make_manager"):
        manager.load_built_in("cache", "prefix")  # requests read the cached KV of their prefixes
    policy = manager.build("scheduler", config.scheduler)
    manager.load_built_in("scheduler", "guard")  # keeps promise 6
    for wrap in reversed(manager.hook.minisgl_wrap_policy(config=config)):  # the plugin loaded last is the outermost
        policy = wrap(policy)
    if proposer is None and config.speculation is not None:
        proposer = manager.build("speculation", config.speculation, spec=engine.spec)
    speculation = None
    if proposer is not None:
        speculation = proposer.speculate(
            engine.spec,
            clock,
            max_draft_tokens=config.max_draft_tokens,
            adapt=adapt_drafts,
            rounds=config.verification_rounds,
        )
    if speculation is not None and not exists("minisgl.plugins.speculation.verification"):
        raise ConfigError("Drafts need the plugin plugins/speculation/verification, which is missing.")
    eos_ids = engine.eos_ids | frozenset(() if tokenizer is None else tokenizer.eos_ids)
    loaded, hook = set[tuple[str, str, str]](), manager.hook

    def constraint_of(req: Req) -> Any:
        grammar, vocab_size, made = req.params.grammar, engine.spec.vocab_size, None
        if grammar is not None:
            if grammars is None:
                raise InvalidRequestError(grammar.field, "A grammar needs plugins/grammar, which is missing.")
            made = grammars.constraint(grammar, vocab_size, sorted(eos_ids))
        for parameter, kind, name in plugins_of(req.params) - loaded:
            if not manager.load_built_in(kind, name):
                what = f"{parameter} needs the plugin plugins/{kind}/{name}, which is missing."
                raise InvalidRequestError(parameter, what)
            loaded.add((parameter, kind, name))
        given = {"req": req, "vocab_size": vocab_size, "eos_ids": eos_ids, "tokenizer": tokenizer}
        for wrap in reversed(hook.minisgl_wrap_constraint(**given)):  # the plugin loaded last is the outermost
            made = wrap(made)
        return made

    return Scheduler(
        engine,
        cache,
        policy,
        max_prefill_tokens=config.max_prefill_tokens,
        overlap=config.overlap,
        eos_ids=eos_ids,
        seed=config.seed,
        observer=HookObserver(manager.hook),
        clock=clock,
        speculation=speculation,
        constraint_of=constraint_of,
        make_manager=manager.hook.minisgl_cache_manager(),
    )


def plugins_of(params: SamplingParams) -> set[tuple[str, str, str]]:
    """Return the plugins that a request needs: the parameter that needs it, its kind, and its name."""
    found = {
        (parameter, *plugin)
        for parameter, plugin in PARAMETER_PLUGINS.items()
        if getattr(params, parameter) != getattr(_DEFAULT, parameter)
        and not (params.greedy and parameter in NOT_IF_GREEDY)
    }
    if params.grammar is not None and params.grammar.after:
        found.add((params.grammar.field, "constraint", "after_token"))
    return found

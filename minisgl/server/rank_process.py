"""The process of rank 0: it schedules the steps and executes them. Other ranks only execute them.

This module connects messages with a scheduler and an engine. Text and HTTP are handled by the other processes.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import TYPE_CHECKING

import zmq

from minisgl.core import InvalidRequestError, Output
from minisgl.message import (
    Abort,
    Accepted,
    Call,
    Delta,
    Message,
    NewRequest,
    Outputs,
    Replies,
    Schedule,
    Stop,
    unpack_ids,
)
from minisgl.message.link import Link, refusal
from minisgl.message.queue import Addresses, Pull, Push
from minisgl.models.resolve import resolve_model
from minisgl.plugin_manager.encoding import decode_config, early_of, options_of, plugins_of, started_early
from minisgl.plugin_manager.failures import described
from minisgl.plugin_manager.manager import PluginManager
from minisgl.scheduler.build import build_scheduler
from minisgl.scheduler.scheduler import Scheduler
from minisgl.server.worker_pool import Ready, Report
from minisgl.tokenizer.detokenizer import PROMPT_TAIL_TOKENS
from minisgl.tokenizer.tokenizer import build_grammars, build_tokenizer

if TYPE_CHECKING:
    from minisgl.config import Config
    from minisgl.engine.engine import TorchEngine


def run_rank(report: Report, addresses: Addresses, encoded: bytes) -> None:
    """Run the only rank until the server ends. This is the ``body`` argument of `worker_main`.

    ``encoded`` is the config, encoded by `encode_config`. Of several ranks, `minisgl.plugins.ranks.local` runs each.
    """
    config, manager, engine = build_rank(encoded)
    context = zmq.Context()
    run_leader(report, addresses, context, config, manager, engine)
    # This line is reached only if no error occurred. After an error the engine is not closed, because closing could
    # wait for a rank that has died. Rank 0's engine tells the other ranks to end.
    engine.close()
    context.destroy(linger=500)


def build_rank(encoded: bytes, rank: int = 0, rendezvous: str = "") -> tuple[Config, PluginManager, TorchEngine]:
    """Load the plugins and build the engine of a rank. Return its config, too.

    ``rendezvous`` is the address (host:port) at which the ranks' communicators connect; empty if there is one rank.
    """
    with started_early(early_of(encoded), *options_of(encoded, "device", "tp")):  # before the plugins import torch
        manager = PluginManager.load(plugins_of(encoded))
        config = decode_config(encoded, manager)
        from minisgl.engine.build import build_engine

        return config, manager, build_engine(config, manager, rank, config.tp, rendezvous)


def ready(manager: PluginManager, engine: TorchEngine) -> Ready:
    """Return the report that this rank is ready."""
    return Ready([(plugin.name, str(plugin.path), plugin.sha256) for plugin in manager.plugins], engine.spec)


def run_leader(
    report: Report,
    addresses: Addresses,
    context: zmq.Context[zmq.Socket[bytes]],
    config: Config,
    manager: PluginManager,
    engine: TorchEngine,
) -> None:
    """Run rank 0: schedule requests until a `Stop` message arrives."""
    for kind, name in (("observer", "metrics"), ("observer", "heap"), ("scheduler", "pauses")):  # no `LLM` has them
        manager.load_built_in(kind, name)
    tokenizer = build_tokenizer(config.tokenizer, manager, resolve_model(config.model), False)
    grammars = build_grammars(lambda: config.grammar, manager, tokenizer)
    to_api = Push(context, addresses.api).send
    link = Link(to_api)
    scheduler = build_scheduler(config, manager, engine, tokenizer=tokenizer, grammars=grammars, link=link)
    loop = SchedulerLoop(
        scheduler,
        Pull(context, addresses.scheduler),
        to_api=to_api,
        to_detokenizer=Push(context, addresses.detokenizer).send,
        manager=manager,
        link=link,
    )
    gc.collect()
    gc.freeze()  # the objects of the model and the engine live until the process ends: exclude them from collections
    report.send(ready(manager, engine))
    try:
        loop.run()
        scheduler.close()
    except BaseException as error:
        with contextlib.suppress(Exception):  # observers learn the end of the requests; one of them may have failed
            scheduler.fail(described(error))
        raise
    finally:
        manager.close()


class SchedulerLoop:
    """Rank 0's main loop: it reads messages, steps the scheduler and sends the outputs.

    An exception in the loop ends the process, and thereby the server: after an error the engine's state is unknown, so
    it must not serve further requests. The functions of `Call` may use all that has a public name here.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        inbox: Pull,
        *,
        to_api: Callable[[Message], None],
        to_detokenizer: Callable[[Message], None],
        manager: PluginManager,
        link: Link | None = None,
    ):
        self.scheduler, self.inbox, self.manager = scheduler, inbox, manager
        self.to_api, self._to_detokenizer, self.link = to_api, to_detokenizer, link or Link(to_api)
        self._new_requests: list[NewRequest] = []
        self._stopped = False

    def run(self) -> None:
        """Run until a `Stop` message arrives. Wait for messages only if the scheduler has no work."""
        while not self._stopped:
            if has_work := self.scheduler.has_work:
                self.scheduler.read_verification()
            for message in self.inbox.drain(block=not has_work):
                self._handle(message)
            if self._new_requests:
                accepted = [(req.uid, req.prompt_tokens) for req in self._new_requests]
                self.to_api(Accepted([uid for uid, _ in accepted], [tokens for _, tokens in accepted]))
            output = Output()
            if self.scheduler.has_work and not self._waited():
                output = self.scheduler.step()
            if self._new_requests or output:
                self._to_detokenizer(Outputs(self._new_requests, output))
                self._new_requests = []

    def _waited(self) -> bool:
        """Wait if an observer holds the next step, until a message arrives or a second has passed. Return if so."""
        seconds = self.link.hold()
        if seconds > 0:
            self.inbox.wait(min(seconds, 1.0))
        return seconds > 0

    def _handle(self, message: Message) -> None:
        match message:
            case Schedule():
                self._add(message)
            case Abort(uids=uids):
                for uid in uids:
                    self.scheduler.abort_request(uid)
            case Call():
                message.run(self)
            case Stop():
                self._stopped = True
            case _:
                raise TypeError(f"a scheduler got a {type(message).__name__}")

    def _add(self, message: Schedule) -> None:
        prompt_ids = unpack_ids(message.prompt_ids)
        prompt_ids.flags.writeable = False  # the requests share it
        refused = []
        group = {"group": message.group} if message.group else {}
        for i, uid in enumerate(message.uids):
            params = message.params.of_choice(i)
            try:
                self.scheduler.add_request(uid, prompt_ids, params, **group)
            except InvalidRequestError as error:
                refused.append(Delta(uid, finish=refusal(uid, error)))
            else:
                tail = prompt_ids if params.prompt_logprobs is not None else prompt_ids[-PROMPT_TAIL_TOKENS:]
                self._new_requests.append(NewRequest(uid, tail.tolist(), params, len(prompt_ids)))
        if refused:
            self.to_api(Replies(refused))

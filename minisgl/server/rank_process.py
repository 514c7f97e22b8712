"""What the scheduler processes do: one for each tensor-parallel rank; rank 0 plans, the others replay its steps.

Knows messages, and how to drive a scheduler; text and HTTP are others' business.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING

import zmq

from minisgl.core import InvalidRequestError, Output
from minisgl.engine.build import LeaderEngine, build_engine, follow
from minisgl.message import (
    Abort,
    Accepted,
    Addresses,
    Delta,
    GetStats,
    Message,
    Opened,
    Outputs,
    Pull,
    Push,
    Replies,
    Schedule,
    Stats,
    Stop,
    unpack_ids,
)
from minisgl.plugin_manager.manager import PluginManager, decode_config, plugins_of
from minisgl.scheduler.build import build_scheduler
from minisgl.scheduler.scheduler import Scheduler
from minisgl.server.child import Ready, Report
from minisgl.server.errors import refusal
from minisgl.server.heartbeat import Heartbeat
from minisgl.tokenizer.detokenizer import TAIL

if TYPE_CHECKING:
    from minisgl.config import Config
    from minisgl.engine.engine import TorchEngine

END = b""
"""What rank 0 sends the other ranks after its last step."""


def run_rank(
    report: Report, addresses: Addresses, encoded: bytes, rank: int, rendezvous: str, heartbeat: Heartbeat | None
) -> None:
    """The body of one rank's process. ``encoded`` is the config, ``rendezvous`` where the ranks meet (host:port);
    rank 0 has a ``heartbeat``."""
    manager = PluginManager.load(plugins_of(encoded))
    config = decode_config(encoded, manager)
    context = zmq.Context()
    engine = build_engine(config, manager, rank, config.tp, rendezvous)
    if manager.calls:
        report.keep_sending(manager.called)
    ready = Ready([(plugin.name, str(plugin.path), plugin.sha256) for plugin in manager.plugins], engine.spec)
    if heartbeat is not None:
        _lead(report, ready, addresses, context, config, manager, engine, heartbeat)
    else:
        inbox = Pull(context, addresses.followers[rank - 1])
        report.send(ready)
        follow(engine, lambda: inbox.receive_bytes() or None)
    # Only a proper end comes here: closing an engine after a failure could wait for a peer that is gone.
    engine.close()
    context.destroy(linger=500)


def _lead(
    report: Report,
    ready: Ready,
    addresses: Addresses,
    context: zmq.Context[zmq.Socket[bytes]],
    config: Config,
    manager: PluginManager,
    engine: TorchEngine,
    heartbeat: Heartbeat,
) -> None:
    """Rank 0: schedule until asked to stop, then send the others home."""
    followers = [Push(context, address) for address in addresses.followers]

    def send(data: bytes) -> None:
        for follower in followers:
            follower.send_bytes(data)

    loop = SchedulerLoop(
        build_scheduler(config, manager, LeaderEngine(engine, send) if followers else engine),
        Pull(context, addresses.scheduler),
        to_api=Push(context, addresses.api).send,
        to_detokenizer=Push(context, addresses.detokenizer).send,
        metrics=manager.hook.minisgl_metrics,
        heartbeat=heartbeat,
    )
    gc.collect()
    gc.freeze()  # what is here now stays: no collection needs to look at it again
    report.send(ready)
    try:
        loop.run()
    finally:
        manager.close()
    send(END)


class SchedulerLoop:
    """Takes messages, steps the scheduler, sends what came of it. What it raises ends the process, and with it the
    server: an engine that failed once is not to be trusted with the next request."""

    def __init__(
        self,
        scheduler: Scheduler,
        inbox: Pull,
        *,
        to_api: Callable[[Message], None],
        to_detokenizer: Callable[[Message], None],
        metrics: Callable[[], list[str]],
        heartbeat: Heartbeat,
    ):
        self._scheduler, self._inbox = scheduler, inbox
        self._to_api, self._to_detokenizer, self._metrics = to_api, to_detokenizer, metrics
        self._heartbeat = heartbeat
        self._opened: list[Opened] = []
        self._stopped = False

    def run(self) -> None:
        """Until a `Stop` comes. Waits for messages only when there is nothing to compute."""
        while not self._stopped:
            if idle := not self._scheduler.has_work:
                self._heartbeat.rest()
            for message in self._inbox.drain(block=idle):
                self._heartbeat.beat()
                self._handle(message)
            self._heartbeat.beat()
            if self._opened:
                self._to_api(Accepted([opened.uid for opened in self._opened]))
            output = self._scheduler.step() if self._scheduler.has_work else Output()
            if self._opened or output:
                self._to_detokenizer(Outputs(self._opened, output))
                self._opened = []
        self._heartbeat.rest()

    def _handle(self, message: Message) -> None:
        match message:
            case Schedule():
                self._add(message)
            case Abort(uids=uids):
                for uid in uids:
                    self._scheduler.abort_request(uid)
            case GetStats(uid=uid):
                values = {name: float(value) for name, value in self._scheduler.stats().items()}
                self._to_api(Stats(uid, values, "".join(self._metrics())))
            case Stop():
                self._stopped = True
            case _:
                raise TypeError(f"a scheduler got a {type(message).__name__}")

    def _add(self, message: Schedule) -> None:
        prompt = unpack_ids(message.prompt)
        try:
            self._scheduler.add_request(message.uid, prompt, message.params)
        except InvalidRequestError as refused:
            self._to_api(Replies([Delta(message.uid, finish=refusal(message.uid, refused))]))
        else:
            self._opened.append(Opened(message.uid, prompt[-TAIL:].tolist(), message.params))

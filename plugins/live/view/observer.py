"""The live view's half in rank 0's process: it sends events while a page is open, and can hold the next step.

It never waits for the API server: while `MAX_BEHIND` messages are unread, it drops events. The pages then get the state
anew. With ``text=False``, token ids are replaced by 0 before they leave this process.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from minisgl.config import Config
from minisgl.core import I32, EngineSpec, Req, Step, StepResult
from minisgl.hooks import hookimpl
from minisgl.message.link import Link
from minisgl.plugins.live.view.kept import Held, Kept
from minisgl.plugins.live.view.mirror import Mirror, hide
from minisgl.trace import events as ev
from minisgl.trace.record import EventMaker, header

TOPIC = "live"
FLUSH_SECONDS = 0.05
"""Seconds for which events are collected before they are sent, while requests are open."""
MAX_BEHIND = 64
"""The largest number of messages that the API server has not read, before events are dropped."""
_encode = msgspec.json.encode


class Pace:
    """How fast the server goes on: at once, after ``delay`` seconds, or, if it is paused, for ``steps`` more steps."""

    def __init__(self, delay: float):
        self.start_delay = self.delay = delay
        self.paused, self.steps = False, 0
        self._next = self._held_since = 0.0

    @property
    def is_slow(self) -> bool:
        return self.paused or self.delay > 0

    def hold(self) -> float:
        """Return the seconds for which the next step has to wait."""
        now = time.monotonic()
        seconds = max(self._next - now, 0.0) if self.delay else 0.0
        if self.paused:
            seconds = 0.0 if self.steps > 0 else float("inf")
        if seconds > 0.0:
            self._held_since = self._held_since or now
        return seconds

    def launched(self) -> tuple[float, float] | None:
        """Note that a step begins. Return from when to when it had to wait, or None."""
        held, now = self._held_since, time.monotonic()
        self._held_since = 0.0
        self.steps = max(self.steps - 1, 0)
        if self.delay:
            self._next = now + self.delay
        return (held, now) if held else None

    def event(self) -> dict[str, Any]:
        return {"event": "pace", "paused": self.paused, "delay": self.delay}


class LiveObserver(EventMaker):
    """Mirrors the scheduler, and sends events while the API server asks for them."""

    def __init__(self, config: Config, spec: EngineSpec, link: Link, *, text: bool, delay: float):
        super().__init__(self._take, checksums=False)
        self.mirror, self.pace = Mirror(spec), Pace(delay)
        self._link, self._text = link, text
        first = header(config, spec)
        first.plugins, first.hidden_tokens = [], not text
        first.options.pop("trace", None)
        self._header = first
        self._watched = self._lost = False
        self._begins_anew = False  # the recording of the API server, with the next state
        self._events: list[ev.Event] = []
        self._sent = self._read = 0  # numbers of messages
        self._last_flush = 0.0
        self._key = os.urandom(16)
        self._kept = Kept(self._salt_of)
        link.receivers[TOPIC] = self._receive
        link.holds.append(self._hold)

    # ---- messages --------------------------------------------------------------------------------------

    def _receive(self, data: bytes) -> None:
        command = msgspec.json.decode(data)
        pace = self.pace
        match command["do"]:
            case "read":
                self._read = command["number"]
            case "now":
                self._watch()
                self._flush()
                if self._begins_anew:  # older token ids are of pages that may hold other tokens by now
                    self._begins_anew = False
                    self._kept.begin(self.mirror.tokens)
                self._send_now()
            case "unwatch":
                self._watched, self._events = False, []
                self._lost = self._begins_anew = False
                self._kept.begin({})
            case "leave":
                pace.paused, pace.delay = False, pace.start_delay
            case "tokens":
                self._flush()
                self._send(b"t", self._kept.encode(entry.req for entry in self.mirror.open.values()))
            case "pause":
                pace.paused, pace.steps = True, 0
            case "step":
                pace.paused, pace.steps = True, pace.steps + command["steps"]
            case "resume":
                pace.paused = False
            case "delay":
                pace.delay = command["seconds"]
        if command["do"] in ("pause", "step", "resume", "delay"):
            self._flush()
            self._send(b"e", _encode(pace.event()))

    def _hold(self) -> float:
        seconds = self.pace.hold()
        if seconds > 0:
            self._flush()  # no turn of the loop will do so for a while
        return seconds

    def _watch(self) -> None:
        if not self._watched:
            mirror = self.mirror
            self._watched, self._events = True, []
            self._kept.begin(mirror.tokens)
            self.next_step, self.num_open = mirror.next_step, len(mirror.open)
            self.unread = {step.id: step for step, _, _ in mirror.in_flight}

    def _send_now(self) -> None:
        state = {**self.mirror.now(self._text), "t": time.monotonic(), "text": self._text}
        if self._text:
            for each in state["requests"]:
                each["salt"] = self._salt_of(self.mirror.open[each["uid"]].req)
        self._send(b"n", ev.encoder.encode_lines([self._header]) + _encode(state) + b"\n" + _encode(self.pace.event()))

    def _send(self, kind: bytes, data: bytes) -> None:
        self._sent += 1
        self._link.send(TOPIC, kind + b"%d\n" % self._sent + data)

    def _flush(self) -> None:
        events, self._events = self._events, []
        if not events:
            return
        self._last_flush = time.monotonic()
        if self._sent - self._read > MAX_BEHIND:
            self._lost = True
            return
        if self._lost:
            self._lost, self._begins_anew = False, True
            self._send(b"l", b"")  # every page needs the state anew, and asks for it
            return
        self._send(b"e", ev.encoder.encode_lines(events).rstrip())

    def _take(self, event: ev.Event) -> None:
        if not self._text:
            hide(event)
        elif isinstance(event, ev.Add) and event.cache_salt is not None:
            event.cache_salt = self._hash(event.cache_salt)
        self._events.append(event)

    def _salt_of(self, req: Req) -> str | None:
        return None if req.params.cache_salt is None else self._hash(req.params.cache_salt)

    def _hash(self, salt: str) -> str:
        """Return a name for a salt, which says only which requests have the same."""
        return hashlib.blake2b(salt.encode("utf-8", "replace"), key=self._key).hexdigest()[:8]

    # ---- requests ------------------------------------------------------------------------------------

    @hookimpl
    def minisgl_request_added(self, req: Req, now: float) -> None:
        self.mirror.request_added(req, now)
        if self._watched:
            super().minisgl_request_added(req, now)

    @hookimpl
    def minisgl_prefix_matched(self, req: Req, pages: I32, step: int) -> None:
        self.mirror.prefix_matched(req, pages, step)
        if self._watched:
            super().minisgl_prefix_matched(req, pages, step)

    @hookimpl
    def minisgl_request_retracted(self, req: Req, step: int) -> None:
        self.mirror.request_retracted(req, step)
        if self._watched:
            super().minisgl_request_retracted(req, step)

    @hookimpl
    def minisgl_request_finished(self, req: Req, now: float) -> None:
        self.mirror.request_finished(req, now)
        if self._watched:
            self._kept.end(req)
            super().minisgl_request_finished(req, now)

    # ---- pages ---------------------------------------------------------------------------------------

    @hookimpl
    def minisgl_pages_allocated(self, step: int, owners: I32, pages: I32) -> None:
        self.mirror.pages_allocated(owners, pages)
        if self._watched:
            super().minisgl_pages_allocated(step, owners, pages)

    @hookimpl
    def minisgl_pages_cached(self, step: int, req: Req, pages: I32, start: int, cached_pages: I32) -> None:
        self.mirror.pages_cached(step, req, pages, start, cached_pages)
        if self._watched:
            super().minisgl_pages_cached(step, req, pages, start, cached_pages)

    @hookimpl
    def minisgl_pages_evicted(self, step: int, pages: I32) -> None:
        self.mirror.pages_evicted(pages)
        if self._watched:
            super().minisgl_pages_evicted(step, pages)

    @hookimpl
    def minisgl_pages_freed(self, step: int, owner: int, pages: I32) -> None:
        self.mirror.pages_freed(step, pages)
        if self._watched:
            super().minisgl_pages_freed(step, owner, pages)

    @hookimpl
    def minisgl_pages_counted(self, step: int, free: int, cached: int, evictable: int, retiring: int) -> None:
        if not self._watched:
            return
        super().minisgl_pages_counted(step, free, cached, evictable, retiring)
        if not self.num_open or self.pace.is_slow or time.monotonic() - self._last_flush >= FLUSH_SECONDS:
            self._flush()

    # ---- steps ---------------------------------------------------------------------------------------

    @hookimpl
    def minisgl_batch_planned(self, rows: Sequence[tuple[int, int]]) -> None:
        if self._watched:
            super().minisgl_batch_planned(rows)

    @hookimpl
    def minisgl_batch_scheduled(self, step: Step, reqs: Sequence[Req], now: float) -> None:
        held = self.pace.launched()
        self.mirror.batch_scheduled(step, reqs, now)
        if self._watched and held is not None:  # a what-if leaves this time out
            self._events.append(Held(step.id, min(held[0], now), now))
        if self._watched:
            super().minisgl_batch_scheduled(step, reqs, now)

    @hookimpl
    def minisgl_step_finished(self, result: StepResult, reqs: Sequence[Req | None], now: float) -> None:
        self.mirror.step_finished(result, reqs, now)
        if self._watched:
            super().minisgl_step_finished(result, reqs, now)

    @hookimpl
    def minisgl_closed(self) -> None:
        if self._watched:
            super().minisgl_closed()
            self._flush()

"""The live view's half in the API server's process: the page at ``/``, and the events at ``/live``.

The extension asks the observer for events while a page is open, and passes them on to all pages. Each page has a queue
of `MAX_WAITING` bytes. A page that does not read in time loses what waits, is told so, and gets the state anew. The
observer and the other pages never wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections import deque
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any, ClassVar, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from minisgl.message import Delta
from minisgl.plugins.live.view.futures import Question, WhatIfBody, ask
from minisgl.plugins.live.view.observer import TOPIC
from minisgl.server.app import GET_OR_HEAD, Api
from minisgl.server.errors import CLIENT_CLOSED_REQUEST, ApiError
from minisgl.server.extension import HttpExtension
from minisgl.server.generate import Json, run_unless_disconnected, wait_for_disconnect
from minisgl.server.request_record import Stream
from minisgl.trace.draw.svg import theme

log = logging.getLogger(__name__)

MAX_PAGES = 64
"""The largest number of open pages."""
MAX_WAITING = 1 << 20
"""The largest size of the events that wait for one page, in bytes."""
LOOK_SECONDS = 0.25
"""Seconds between two looks of an idle page's connection at whether the server ends."""
QUIET_LOOKS = 60
"""Looks without an event after which a comment is sent, so that proxies keep the connection."""
LINGER_SECONDS = 10.0
"""Seconds after the end of the last page for which the recording goes on: the page may only have been loaded again."""
MAX_RECORDED = 32 << 20
"""The largest size of the recording for a what-if, in bytes."""
REPLY_SECONDS = 30.0
"""Seconds in which the observer must send the token ids."""
KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}
_VIEWER = re.compile(r"[a-z0-9]{16,64}")
_OWN = re.compile(r".*-live\.([a-z0-9]{16,64})\.[0-9]+")


class PaceBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of ``POST /live/pace``."""

    do: Literal["pause", "resume", "step", "delay"]
    steps: int = 1
    seconds: float = 0.0

    BOUNDS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "steps": {"minimum": 1, "maximum": 1000},
        "seconds": {"minimum": 0, "maximum": 60},
    }

    def check(self) -> PaceBody:
        """Return this body. Raise `ApiError` if a number is out of range."""
        for name, bounds in self.BOUNDS.items():
            if not bounds["minimum"] <= getattr(self, name) <= bounds["maximum"]:
                raise ApiError(400, f"{name} must be from {bounds['minimum']} to {bounds['maximum']}.", name)
        return self


def described(kind: type[PaceBody | WhatIfBody]) -> dict[str, Any]:
    """Return the part of a route's description in ``/openapi.json`` that has the schema of its body."""
    (_, made) = msgspec.json.schema_components([kind])
    schema = {**made[kind.__name__], "additionalProperties": {"type": "null"}}  # null is as if it were missing
    schema["properties"] = {name: {**each, **kind.BOUNDS.get(name, {})} for name, each in schema["properties"].items()}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


class Recording:
    """The observer's events since the first page was opened, as JSON lines, for a what-if."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self._size = 0

    def clear(self) -> None:
        """Forget the events: others follow a gap."""
        self.parts, self._size = [], 0

    def take(self, kind: bytes, data: bytes) -> None:
        """Record a message of the observer: a recording begins with the state."""
        if kind == b"l":
            self.clear()
        elif (kind == b"e") == bool(self.parts) and not self.is_full:
            self.parts.append(data)
            self._size += len(data)

    @property
    def is_full(self) -> bool:
        """Whether it has no more room: it ends before the newest step."""
        return self._size > MAX_RECORDED


class Live(HttpExtension):
    """Serves the page, and passes on the observer's events. ``control``: a page may slow the server down."""

    def __init__(self, control: bool, text: bool):
        self._control, self._text = control, text
        folder = files("minisgl.plugins.live.view") / "page"
        self._files = {
            each.name: each.read_bytes() for each in folder.iterdir() if each.name.rpartition(".")[2] in KINDS
        }
        self._files["live.css"] = theme(":root").encode() + self._files["live.css"]
        self._pages: set[_Page] = set()
        self._api: Api | None = None
        self._recording = Recording()
        self._linger: asyncio.TimerHandle | None = None
        self._tokens: asyncio.Future[tuple[bytes, bytes]] | None = None  # what a what-if waits for

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """Answer ``GET /`` with the page if a browser asks. Other clients get what they get without it."""

        async def paged(scope: Scope, receive: Receive, send: Send) -> None:
            is_root = scope["type"] == "http" and scope["path"] == scope.get("root_path", "") + "/"
            if is_root and scope["method"] in GET_OR_HEAD and "text/html" in Headers(scope=scope).get("accept", ""):
                await self._file("index.html")(scope, receive, send)
            else:
                await app(scope, receive, send)

        return paged

    def _file(self, name: str) -> Response:
        if name not in self._files:
            raise ApiError(404, "The live view has no such file.", code="unknown_url")
        kind = KINDS[name.rpartition(".")[2]]
        return Response(self._files[name], headers=HEADERS, media_type=kind)

    def add_probes(self, router: APIRouter, api: Api) -> None:
        @router.api_route("/live/page/{name}", methods=GET_OR_HEAD)
        async def read_page_file(name: str) -> Response:
            return self._file(name)

    def add_routes(self, router: APIRouter, api: Api) -> None:
        self._api = api
        api.dispatcher.link.receivers[TOPIC] = self._receive

        @router.get("/live")
        async def read_events(viewer: str = "") -> Response:
            if viewer and not _VIEWER.fullmatch(viewer):
                raise ApiError(400, "viewer must be 16 to 64 small letters and digits.", "viewer")
            if api.dispatcher.state != "ready":
                raise api.dispatcher.unavailable()
            if len(self._pages) >= MAX_PAGES:
                raise ApiError(503, f"{MAX_PAGES} pages of the live view are open: close one.", code="overloaded")
            facts = {"event": "server", "model": api.model, "control": self._control, "text": self._text}
            return _Page(self, viewer, facts)

        @router.post("/live/pace", openapi_extra=described(PaceBody))
        async def set_pace(request: Request) -> Response:
            body, _ = await api.read(request, PaceBody, PaceBody.check)
            if not self._control:
                raise ApiError(403, "The pages may not slow this server down (live.control).", "do", "not_allowed")
            if not self._pages:
                raise ApiError(409, "No page of the live view is open: GET /live first.", "do", "no_page")
            self._tell(msgspec.structs.asdict(body))
            return Json({"status": "ok"})

        @router.post("/live/what-if", openapi_extra=described(WhatIfBody))
        async def what_if(request: Request) -> Response:
            body, overrides = await api.read(request, WhatIfBody, WhatIfBody.overrides)
            found: list[bytes] = []

            async def asked() -> None:
                found.append(await self._ask(body.at, overrides))

            if not await run_unless_disconnected(request.receive, asked()):  # a cancelled simulation ends its process
                return Response(status_code=CLIENT_CLOSED_REQUEST)
            return Response(found[0], media_type="application/json")

    async def _ask(self, at: int, overrides: list[str]) -> bytes:
        """Return both futures of the recording from step ``at`` on, as JSON. Raise `ApiError`."""
        if not self._control:
            raise ApiError(403, "The pages may start no simulation on this server (live.control).", "at", "not_allowed")
        if not self._recording.parts:
            raise ApiError(409, "Nothing is recorded: open a page of the live view first.", "at", "no_page")
        if self._tokens is not None:
            raise ApiError(409, "Another simulation runs: try again when it has ended.", "at", "overloaded")
        self._tokens = asyncio.get_running_loop().create_future()
        try:
            self._tell({"do": "tokens"})
            lines, tokens = await asyncio.wait_for(self._tokens, REPLY_SECONDS)
            if not lines:
                raise ApiError(
                    409,
                    "Events were lost, because this server was too slow for them: the recording begins anew with the "
                    "next step. Earlier steps are gone.",
                    "at",
                    "overloaded",
                )
            return await ask(Question(lines, tokens, at, overrides, self._recording.is_full))
        except TimeoutError:
            raise ApiError(503, "The scheduler did not send the tokens of the recording.", code="overloaded") from None
        finally:
            self._tokens = None

    def watch(self, stream: Stream) -> Callable[[int, Delta], None] | None:
        """Tell a page the uids of its own request. The page chose the request id, by which the request is found."""
        own = _OWN.fullmatch(stream.response_id) if self._pages else None
        for page in self._pages if own else ():
            if own and page.viewer == own[1]:
                page.put(_frame(msgspec.json.encode({"event": "own", "id": stream.response_id, "uids": stream.uids})))
        return None

    # ---- events --------------------------------------------------------------------------------------

    def _tell(self, command: dict[str, Any]) -> None:
        assert self._api is not None
        self._api.dispatcher.link.send(TOPIC, msgspec.json.encode(command))

    def _receive(self, message: bytes) -> None:
        """Pass on a message of the observer. Its first byte is its kind.

        The kinds are events, the state now, lost events, and token ids, which no page gets.
        """
        first, _, data = message.partition(b"\n")
        self._tell({"do": "read", "number": int(first[1:])})
        if first[:1] == b"t":
            if self._tokens is not None and not self._tokens.done():
                # Joined now: later events belong to requests and pages whose tokens these are not.
                self._tokens.set_result((b"\n".join(self._recording.parts), data))
            return
        self._recording.take(first[:1], data)
        frame = _frame(data)
        for page in self._pages:
            match first[:1]:
                case b"n" if page.needs_state:
                    page.begin(frame)
                case b"e" if page.needs_state:
                    page.miss()
                case b"e":
                    page.put(frame)
                case b"l":
                    page.lose()
        if first[:1] == b"l" and self._pages:
            self.ask()

    def ask(self) -> None:
        """Ask the observer for the state."""
        self._tell({"do": "now"})

    def open(self, page: _Page) -> None:
        """Add a page that was opened."""
        if self._linger is not None:
            self._linger.cancel()
        self._pages.add(page)
        self.ask()

    def shut(self, page: _Page) -> None:
        """Remove a page that was closed. After the last one, the server goes on, and soon the observer is silent."""
        self._pages.discard(page)
        if not self._pages:
            self._tell({"do": "leave"})
            self._linger = asyncio.get_running_loop().call_later(LINGER_SECONDS, self._forget)

    def _forget(self) -> None:
        self._tell({"do": "unwatch"})
        self._recording.clear()

    @property
    def ends(self) -> bool:
        """Whether the server ends now: it waits for no more requests. A pause must not hold up their end."""
        assert self._api is not None
        dispatcher = self._api.dispatcher
        if dispatcher.state == "draining" and dispatcher.num_open and self._control:
            self._tell({"do": "resume"})
            self._tell({"do": "delay", "seconds": 0.0})
        return dispatcher.state != "ready" and not (dispatcher.state == "draining" and dispatcher.num_open)


class _Page(Response):
    """The events for one open page: a response of server-sent events that ends with the connection, or the server."""

    media_type = "text/event-stream"

    def __init__(self, live: Live, viewer: str, facts: dict[str, Any]):
        self.status_code, self.background = 200, None
        self.init_headers({"cache-control": "no-store", "x-content-type-options": "nosniff"})
        self.viewer, self.needs_state = viewer, True
        self._live, self._frames = live, deque([_frame(msgspec.json.encode(facts))])
        self._waiting = self._num_lost = 0
        self._wake = asyncio.Event()

    def __hash__(self) -> int:
        return id(self)

    def begin(self, frame: bytes) -> None:
        """Send the state, after which events follow."""
        self.needs_state = False
        if self._num_lost:
            frame = _frame(msgspec.json.encode({"event": "lost", "frames": self._num_lost})) + frame
            self._num_lost = 0
        self._add(frame)

    def put(self, frame: bytes) -> None:
        """Send a frame, or lose all frames that wait if they are too many."""
        if self._waiting + len(frame) > MAX_WAITING:
            self.lose()
        else:
            self._add(frame)

    def miss(self) -> None:
        """Count a frame that a page does not get after it lost some."""
        self._num_lost += self._num_lost > 0

    def lose(self) -> None:
        """Lose the frames that wait: the page needs the state before it gets others."""
        self._num_lost += 1 + len(self._frames)
        self._frames.clear()
        self._waiting, self.needs_state = 0, True

    def _add(self, frame: bytes) -> None:
        self._frames.append(frame)
        self._waiting += len(frame)
        self._wake.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(wait_for_disconnect(receive))
        self._live.open(self)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            quiet = 0
            while not gone.done() and not self._live.ends:
                if self._frames:
                    data, quiet = b"".join(self._frames), 0
                    self._frames.clear()
                    self._waiting = 0
                elif quiet >= QUIET_LOOKS:
                    data, quiet = b":\n\n", 0
                else:
                    self._wake.clear()
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._wake.wait(), LOOK_SECONDS)
                    quiet += 1
                    continue
                await send({"type": "http.response.body", "body": data, "more_body": True})  # waits for a slow page
                if self.needs_state and self._num_lost:
                    self._live.ask()
            if not gone.done():
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            gone.cancel()
            self._live.shut(self)


def _frame(lines: bytes) -> bytes:
    """Return JSON lines as one server-sent event."""
    return b"data: " + lines.replace(b"\n", b"\ndata: ") + b"\n\n"

"""`HttpExtension`: what is optional in the API server's process. Extensions add routes, limits, metrics and spans.

A plugin gives the server an extension with the hook `minisgl_http`. Those that minisgl ships are the files of the
folder ``plugins/http``, and ``server.extensions`` selects them. Without any extension the server still answers chats.
An extension runs in the event loop of the API server, so its methods must not block.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import msgspec

from minisgl.config import Config, ConfigError, ServerConfig
from minisgl.core import SamplingParams
from minisgl.message import Delta, Prompt
from minisgl.plugin_manager.discovery import submodules

if TYPE_CHECKING:
    from fastapi import APIRouter
    from starlette.datastructures import Headers
    from starlette.types import ASGIApp

    from minisgl.plugin_manager.manager import PluginManager
    from minisgl.server.app import Api
    from minisgl.server.generate import ResponseBuilder
    from minisgl.server.protocol import AnswerForm
    from minisgl.server.request_record import RequestRecord, Stream

FOLDER = "minisgl.plugins.http"
"""The package of the shipped extensions."""


class Stats(NamedTuple):
    """The scheduler's counts by name, and the metrics of the observers in Prometheus' text format."""

    values: Mapping[str, float]
    text: str = ""


class HttpExtension:
    """An extension that does nothing. A subclass overrides the methods that it needs.

    An extension is built when the worker processes are starting. It may raise `ConfigError` then. ``options`` are the
    options of the section ``server`` that have no effect without it. With ``is_outermost``, what `wrap` makes is around
    what it makes in the other extensions.
    """

    options: ClassVar[tuple[str, ...]] = ()
    is_outermost: ClassVar[bool] = False

    # ---- the process ---------------------------------------------------------------------------------------

    def uvicorn_options(self) -> Mapping[str, Any]:
        """Return arguments of `uvicorn.Config`. Called once, before the HTTP server starts."""
        return {}

    def begin(self, api: Api) -> None:
        """Begin to work: the engine is ready. Called once, before the first request is accepted."""

    def close(self, timeout: float) -> None:
        """End within ``timeout`` seconds. Called once, when the HTTP server has ended."""

    # ---- routes and requests -------------------------------------------------------------------------------

    def add_routes(self, router: APIRouter, api: Api) -> None:
        """Add routes. Called once, before the HTTP server starts.

        A request to a route of ``router`` needs the API key, if there is one. ``api`` parses bodies, submits requests
        and makes responses.
        """

    def add_probes(self, router: APIRouter, api: Api) -> None:
        """Add routes for programs that watch the server: they need no API key. Called once."""

    def check_health(self) -> None:
        """Raise `ApiError` if the server is not healthy: ``/health`` and ``/ready`` then answer with it."""

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """Return an ASGI application around ``app``, all routes of the server. Called once."""
        return app

    def check_headers(self, headers: Headers) -> None:
        """Check the headers of a request before its body is read. Raise `ApiError` to refuse it."""

    def check_fields(self, kind: type, fields: dict[str, msgspec.Raw]) -> None:
        """Check the parameters of a body of type ``kind`` before they are decoded. Raise `ApiError` to refuse them.

        It may change ``fields``, and remove parameters that have no effect.
        """

    def check_body(self, body: msgspec.Struct, max_seq_len: int) -> None:
        """Check a parsed body before any work on its parts. Raise `ApiError` to refuse it.

        ``max_seq_len`` is the largest number of tokens of a request. A large body is checked in another thread.
        """

    def chat_format(self) -> tuple[type[Any], type[ResponseBuilder]] | None:
        """Return the struct of a chat's body, with the methods of `ChatRequest`, and the builder of its response.

        Called once. None leaves it to others: the first extension that returns a format decides.
        """
        return None

    def answer_form(self, body: Any) -> AnswerForm | None:
        """Return how the answer to a chat is asked for and read, or None to leave it to others.

        The first extension that returns a form decides. Called after `check_body`. Raise `ApiError` to refuse the chat.
        """
        return None

    def admit(self, prompts: Sequence[Prompt], params: SamplingParams, record: RequestRecord) -> None:
        """Check a generation before anything is sent to another process. Raise `ApiError` to refuse it."""

    # ---- observing -----------------------------------------------------------------------------------------

    def watch(self, stream: Stream) -> Callable[[int, Delta], None] | None:
        """Return a function that is called with each event of a new stream at its arrival, or None.

        Its arguments are the index of a choice, and the choice's new output.
        """
        return None

    def on_end(self, record: RequestRecord) -> None:
        """Observe an HTTP request whose response has ended."""

    def metrics(self, stats: Stats) -> bytes:
        """Return metrics in Prometheus' text format, which the extension ``metrics`` adds to its own."""
        return b""


def shipped() -> list[str]:
    """Return the names of the extensions that minisgl ships, in the order of the alphabet. A folder is not one."""
    return [name for name in submodules(FOLDER) if not submodules(f"{FOLDER}.{name}")]


def load_extensions(
    config: Config, manager: PluginManager | None = None, names: Iterable[str] | None = None
) -> list[HttpExtension]:
    """Build the shipped extensions of ``server.extensions``, or ``names``, and then those of ``manager``'s plugins.

    Raise `ConfigError` for an unknown name, or if an extension can't be built with these options.
    """
    known = shipped()
    names = config.server.extensions if names is None else names
    for name in names or ():
        if name not in known:
            raise ConfigError(f"server.extensions: there is no extension {name!r}. Known: {', '.join(known)}.")
    modules = [importlib.import_module(f"{FOLDER}.{name}") for name in (known if names is None else names)]
    built = [module.minisgl_http(config=config) for module in modules]
    if manager is not None:
        built += manager.hook.minisgl_http(config=config)
        if config.live is not None:
            built.insert(0, manager.build("live", config.live, all_options=config))  # the others' checks are around it
    return [extension for extension in built if extension is not None]


def overridden(extensions: Sequence[HttpExtension], name: str) -> list[Any]:
    """Return the methods ``name`` of the extensions that have one of their own: the others would do nothing."""
    base = getattr(HttpExtension, name)
    return [getattr(each, name) for each in extensions if getattr(getattr(each, name), "__func__", None) is not base]


def check_options(server: ServerConfig, extensions: Sequence[HttpExtension]) -> None:
    """Raise `ConfigError` for an option that is set, although no extension is loaded in which it has an effect."""
    loaded = {field.name for field in fields(ServerConfig)}.union(*(extension.options for extension in extensions))
    default = type(server)()
    for field in fields(server):
        value = getattr(server, field.name)
        if field.name not in loaded and value != getattr(default, field.name):
            raise ConfigError(
                f"server.{field.name}={value}: the extension with this option is not loaded (server.extensions)."
            )

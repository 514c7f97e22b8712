"""What other servers of the OpenAI API support and minisgl does not: parameters, and encodings of bodies.

A client may send such a parameter with a value that asks for nothing (`NEUTRAL`). With any other value, it is refused
by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec
from starlette.datastructures import Headers

from minisgl import hookimpl
from minisgl.config import Config
from minisgl.sampling_params import shorten
from minisgl.server.errors import ApiError
from minisgl.server.extension import HttpExtension
from minisgl.server.protocol import ChatRequest, CompletionRequest, decode_field, unknown_parameter

_ANY = object()
_MEDIA = "unsupported_media_type"
NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "audio": (),
        "best_of": (1,),
        "echo": (False,),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "include_stop_str_in_output": (False,),
        "length_penalty": (1.0, 1),
        "metadata": (_ANY,),
        "min_tokens": (0,),
        "modalities": (["text"],),
        "parallel_tool_calls": (True, False),
        "prediction": (),
        "prompt_cache_key": (_ANY,),
        "reasoning_effort": (),
        "response_format": ({"type": "text"},),
        "safety_identifier": (_ANY,),
        "service_tier": ("auto", "default"),
        "spaces_between_special_tokens": (True,),
        "store": (False,),
        "suffix": ("",),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "truncate_prompt_tokens": (),
        "use_beam_search": (False,),
        "user": (_ANY,),
        "verbosity": (),
        "web_search_options": (),
    }
)
"""Parameters that minisgl does not support: name → the accepted values, which have no effect.

These are parameters of the OpenAI API and of other servers. `_ANY` accepts every value.
"""
NEUTRAL_OF: Mapping[type[msgspec.Struct], Mapping[str, tuple[Any, ...]]] = MappingProxyType(
    {
        ChatRequest: {"add_generation_prompt": (True,), "add_special_tokens": (False,)},
        CompletionRequest: {"add_special_tokens": (True,)},
    }
)
"""More of `NEUTRAL` for one kind of body: what has no effect in a chat may ask for something in a plain completion."""
NEUTRAL_STREAM_OPTIONS = frozenset({"continuous_usage_stats", "include_obfuscation"})
"""Known entries of ``stream_options`` that minisgl does not support. They are accepted if they are false."""


@hookimpl
def minisgl_http(config: Config) -> HttpExtension:
    return Compatible()


class Compatible(HttpExtension):
    """Removes parameters without effect from the bodies of requests, and refuses bodies in another form than JSON."""

    def check_headers(self, headers: Headers) -> None:
        """Raise `ApiError` unless the headers of a request describe a JSON body that is not compressed.

        A request without ``Content-Type`` is taken for JSON.
        """
        kind, _, parameters = headers.get("content-type", "application/json").lower().partition(";")
        charset = re.search(r"charset\s*=\s*\"?([^\s;\"]*)", parameters)
        if kind.strip() != "application/json" or (charset and charset[1] not in ("utf-8", "utf8", "us-ascii")):
            given = shorten(repr(headers["content-type"]))
            message = f"The Content-Type is {given}, but the body must be JSON in UTF-8. Send the header Content-Type: "
            raise ApiError(415, f"{message}application/json (curl: -H 'Content-Type: application/json').", code=_MEDIA)
        encoding = headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            message = f"The Content-Encoding {shorten(repr(encoding))} is not supported: send the body uncompressed."
            raise ApiError(415, message, code=_MEDIA, headers={"accept-encoding": "identity"})
        coding = headers.get("transfer-encoding", "chunked").strip().lower()
        if coding != "chunked":
            message = f"The Transfer-Encoding {shorten(repr(coding))} is not supported, only 'chunked'."
            raise ApiError(501, message)

    def check_fields(self, kind: type, fields: dict[str, msgspec.Raw]) -> None:
        known = {field.name for field in msgspec.structs.fields(kind)}
        neutral = {**NEUTRAL, **NEUTRAL_OF.get(kind, {})}
        for name in [name for name in fields if name not in known and name in neutral]:
            value = decode_field(name, fields.pop(name))
            accepted = (each is _ANY or (each == value and type(each) is type(value)) for each in neutral[name])
            if value is not None and not any(accepted):
                raise _unsupported(name)
        if "stream_options" in known & fields.keys():
            options = decode_field("stream_options", fields["stream_options"])
            if isinstance(options, dict):
                fields["stream_options"] = msgspec.Raw(msgspec.json.encode(_stream_options(options)))


def _stream_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of ``stream_options`` that minisgl supports."""
    for name, value in options.items():
        if name in NEUTRAL_STREAM_OPTIONS and value not in (None, False):
            raise _unsupported(f"stream_options.{name}")
        if name not in NEUTRAL_STREAM_OPTIONS and name != "include_usage":
            raise unknown_parameter(f"stream_options.{name}")
    return {name: value for name, value in options.items() if name not in NEUTRAL_STREAM_OPTIONS}


def _unsupported(name: str) -> ApiError:
    name = shorten(name)
    return ApiError(400, f"{name} is not supported by this server.", name, "unsupported_parameter")

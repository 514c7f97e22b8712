"""Parameters of the OpenAI API and of other servers that minisgl does not support.

A client may send them with a value that asks for nothing (`NEUTRAL`). With any other value, they are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from minisgl import hookimpl
from minisgl.config import Config
from minisgl.sampling_params import shorten
from minisgl.server.errors import ApiError
from minisgl.server.extension import HttpExtension
from minisgl.server.protocol import ChatRequest, CompletionRequest, decode_field, unknown_parameter

_ANY = object()
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
        "prediction": (),
        "prompt_cache_key": (_ANY,),
        "reasoning_effort": (),
        "response_format": ({"type": "text"},),
        "safety_identifier": (_ANY,),
        "service_tier": ("auto", "default"),
        "spaces_between_special_tokens": (True,),
        "store": (False,),
        "suffix": ("",),
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
    """Removes parameters without effect from the bodies of requests."""

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

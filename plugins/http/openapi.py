"""``/openapi.json``, the description of the routes and of their bodies, and ``/docs``, a page that shows it.

The schemas of bodies are made from the structs that the server parses. The page loads Swagger UI from a content
delivery network, so it needs the internet; the description does not.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec
from fastapi import APIRouter, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.routing import APIRoute

from minisgl import hookimpl
from minisgl.config import Config
from minisgl.core import EngineSpec
from minisgl.plugins.http.admin import AbortBody
from minisgl.plugins.http.answer_format import READERS
from minisgl.plugins.http.apis.completion import CompletionRequest
from minisgl.plugins.http.apis.messages_request import CountTokensRequest, MessagesRequest
from minisgl.plugins.http.apis.parameters import FullChatRequest, FullGenerateRequest
from minisgl.plugins.http.apis.responses_request import ResponsesRequest
from minisgl.plugins.http.compatible import HINTS
from minisgl.plugins.http.tokenize import DetokenizeBody, TokenizeBody
from minisgl.sampling_params import SamplingParams
from minisgl.server.app import GET_OR_HEAD, Api
from minisgl.server.extension import HttpExtension
from minisgl.server.generate import Json
from minisgl.utils.version import __version__

BODIES: Mapping[str, type[msgspec.Struct]] = MappingProxyType(
    {
        "/v1/chat/completions": FullChatRequest,
        "/v1/completions": CompletionRequest,
        "/prove": FullChatRequest,
        "/tokenize": TokenizeBody,
        "/detokenize": DetokenizeBody,
        "/abort_request": AbortBody,
        "/v1/responses": ResponsesRequest,
        "/v1/messages": MessagesRequest,
        "/v1/messages/count_tokens": CountTokensRequest,
    }
)
"""Route → the struct of its body. Another route's body is that of its ``openapi_extra``, or described as any object."""
NO_BODY = ("/ping", "/flush_cache")
"""Routes for POST requests without a body."""
_TOKEN_ID = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_NUMBER_OF_LOGPROBS = {"minimum": 0, "maximum": SamplingParams.MAX_LOGPROBS}
BOUNDS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "n": {"minimum": 1, "maximum": 128},
        "temperature": {"minimum": 0, "maximum": 100},
        "top_p": {"exclusiveMinimum": 0, "maximum": 1},
        "top_k": {"minimum": -1},
        "min_p": {"minimum": 0, "maximum": 1},
        "repetition_penalty": {"exclusiveMinimum": 0},
        "presence_penalty": {"minimum": -2, "maximum": 2},
        "frequency_penalty": {"minimum": -2, "maximum": 2},
        "max_tokens": {"minimum": 0},
        "max_completion_tokens": {"minimum": 1},
        "min_tokens": {"minimum": 0},
        "top_logprobs": _NUMBER_OF_LOGPROBS,
        "prompt_logprobs": _NUMBER_OF_LOGPROBS,
        "cache_salt": {"minLength": 1, "maxLength": SamplingParams.MAX_SALT},
        "priority": {"minimum": -(2**31), "maximum": 2**31 - 1},
        "truncate_prompt_tokens": {"minimum": 1},
        "stop_token_ids": {"items": _TOKEN_ID, "maxItems": SamplingParams.MAX_STOP_TOKEN_IDS},
        "allowed_token_ids": {"items": _TOKEN_ID, "minItems": 1, "maxItems": SamplingParams.MAX_ALLOWED},
        "bad_words": {"maxItems": SamplingParams.MAX_BAD_WORDS},
    }
)
"""Parameter → the bounds of its values, in the words of JSON Schema."""
_PROMPT = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": _TOKEN_ID, "minItems": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
        {"type": "array", "items": {"type": "array", "items": _TOKEN_ID, "minItems": 1}, "minItems": 1},
    ]
}
_TEXT = {"type": "string"}
_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": _TEXT},
    "required": ["type", "text"],
    "additionalProperties": False,
}
_CONTENT = {"anyOf": [_TEXT, {"type": "array", "items": _PART}, {"type": "null"}]}
_MESSAGES = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "properties": {
            "role": {"type": "string"},
            "content": _CONTENT,
        },
        "required": ["role"],
    },
}
"""The messages of a chat. Which other fields they have depends on their role and on the model's chat template."""
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
OVERRIDES: Mapping[tuple[type, str], Mapping[str, Any]] = MappingProxyType(
    {
        (CompletionRequest, "prompt"): _PROMPT,
        (FullChatRequest, "messages"): _MESSAGES,
        (TokenizeBody, "messages"): {"anyOf": [_MESSAGES, {"type": "null"}]},
        (DetokenizeBody, "tokens"): {"type": "array", "items": _TOKEN_ID},
        (ResponsesRequest, "input"): {"anyOf": [_TEXT, {"type": "array", "items": {"type": "object"}}]},
    }
)
"""(body, parameter) → its schema, which the type of the field does not have."""


@hookimpl
def minisgl_http(config: Config) -> HttpExtension:
    return OpenApi()


class OpenApi(HttpExtension):
    """The routes. They need no API key, as in vLLM: they describe the program, not this server's model."""

    def __init__(self) -> None:
        self._routers: list[APIRouter] = []  # their routes are complete when the first request arrives

    def add_routes(self, router: APIRouter, api: Api) -> None:
        self._routers.append(router)

    def add_probes(self, router: APIRouter, api: Api) -> None:
        self._routers.append(router)

        @router.api_route("/openapi.json", methods=GET_OR_HEAD, include_in_schema=False)
        async def openapi() -> Response:
            made = description(route for each in self._routers for route in each.routes)
            spec = api.dispatcher.spec
            return Json(made if spec is None else with_sizes(made, spec))

        @router.api_route("/docs", methods=GET_OR_HEAD, include_in_schema=False)
        async def docs() -> Response:
            return get_swagger_ui_html(openapi_url="openapi.json", title="minisgl")


def description(routes: Iterable[Any]) -> dict[str, Any]:
    """Return the OpenAPI description of the routes of an application."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        if isinstance(route, APIRoute) and route.include_in_schema:
            for method in sorted((route.methods or set()) - {"HEAD"}):
                path = route.path_format.replace(":path}", "}")
                paths.setdefault(path, {})[method.lower()] = _operation(route, path, method)
    schemas = {kind.__name__: body_schema(kind) for kind in BODIES.values()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "minisgl", "version": __version__},
        "paths": paths,
        "components": {"schemas": {**_parts(), **schemas, "Error": _ERROR}},
    }


def with_sizes(schema: Any, spec: EngineSpec) -> Any:
    """Return a description with the sizes of the engine: its token ids, and the longest list of them."""
    if isinstance(schema, dict):
        if schema == _TOKEN_ID:
            return {**schema, "maximum": spec.vocab_size - 1}
        found = {name: with_sizes(value, spec) for name, value in schema.items()}
        if schema.get("items") == _TOKEN_ID and "maxItems" not in schema:
            found["maxItems"] = spec.max_tokens_per_request
        return found
    return [with_sizes(each, spec) for each in schema] if isinstance(schema, list) else schema


def _operation(route: APIRoute, path: str, method: str) -> dict[str, Any]:
    """Return the description of one method of a route."""
    error = {
        "description": "An error, with its parameter",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
    operation: dict[str, Any] = {
        "operationId": f"{route.name}_{method.lower()}",
        "responses": {"200": {"description": "The answer"}, "4XX": error, "503": error},
    }
    names = [parameter.alias for parameter in route.dependant.path_params]
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    described = (route.openapi_extra or {}).get("requestBody")
    if described:  # a plugin's route describes its body itself, with FastAPI's openapi_extra
        operation["requestBody"] = described
    elif method == "POST" and path not in NO_BODY:
        kind = BODIES.get(path)
        schema = {"type": "object"} if kind is None else {"$ref": f"#/components/schemas/{kind.__name__}"}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


@functools.cache
def _components() -> dict[str, Any]:
    _, made = msgspec.json.schema_components(BODIES.values(), ref_template="#/components/schemas/{name}")
    return made


def _parts() -> dict[str, Any]:
    """Return the schemas of the structs inside the bodies."""
    bodies = {kind.__name__ for kind in BODIES.values()}
    return {name: schema for name, schema in _components().items() if name not in bodies}


def body_schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the JSON schema of a body: of the fields of its struct, and of the parameters that extensions accept.

    A parameter that is not required may be null, which is the same as leaving it out.
    """
    made = _components()[kind.__name__]
    properties: dict[str, Any] = {}
    for name, field in made["properties"].items():
        schema = {**field, **BOUNDS.get(name, {})} if "anyOf" not in field else _with_bounds(field, name)
        schema = dict(OVERRIDES.get((kind, name), schema))
        required = name in made.get("required", ())
        properties[name] = schema if required or not schema.keys() - {"default"} else {"anyOf": [schema, _NULL]}
    if issubclass(kind, FullGenerateRequest):
        properties |= {name: {"description": "structured output"} for name in READERS}
        properties |= {name: {"description": f"a hint without effect: {text}"} for name, text in HINTS.items()}
    return {
        "type": "object",
        "properties": properties,
        "required": made.get("required", []),
        "additionalProperties": {"type": "null"},  # as if it were missing
    }


_NULL = {"type": "null"}


def _with_bounds(field: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a schema of several types whose values, unless null, have the bounds of the parameter."""
    options = [each if each == _NULL else {**each, **BOUNDS.get(name, {})} for each in field["anyOf"]]
    return {**field, "anyOf": options}

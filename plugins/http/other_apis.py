"""Routes of the OpenAI API, of vLLM and of SGLang that this server does not have. Each answers 404 and says why."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from fastapi import APIRouter, Request, Response

from minisgl import hookimpl
from minisgl.config import Config
from minisgl.server.app import Api
from minisgl.server.errors import ApiError
from minisgl.server.extension import HttpExtension

_TEXT = "it serves a model that generates text"
ABSENT: Mapping[str, str] = MappingProxyType(
    {
        "/v1/embeddings": f"{_TEXT}, and computes no embeddings",
        "/v1/score": f"{_TEXT}, and scores no pairs of texts",
        "/score": f"{_TEXT}, and scores no pairs of texts",
        "/v1/rerank": f"{_TEXT}, and ranks no documents",
        "/v2/rerank": f"{_TEXT}, and ranks no documents",
        "/rerank": f"{_TEXT}, and ranks no documents",
        "/classify": f"{_TEXT}, and classifies no texts",
        "/pooling": f"{_TEXT}, and returns no hidden states",
        "/v1/moderations": f"{_TEXT}, and classifies no texts",
        "/v1/audio/speech": f"{_TEXT}, not speech",
        "/v1/audio/transcriptions": f"{_TEXT}, and hears no speech",
        "/v1/audio/translations": f"{_TEXT}, and hears no speech",
        "/v1/images/generations": f"{_TEXT}, not images",
        "/v1/images/edits": f"{_TEXT}, not images",
        "/v1/images/variations": f"{_TEXT}, not images",
        "/v1/files": "it stores no files",
        "/v1/batches": "it stores no batches: send their requests one by one",
        "/v1/fine_tuning/jobs": "it does not train models",
        "/generate": "use /v1/completions",
        "/v1/load_lora_adapter": "it has no LoRA adapters",
    }
)
"""Route → the reason why the server does not have it."""


@hookimpl
def minisgl_http(config: Config) -> HttpExtension:
    return OtherApis()


class OtherApis(HttpExtension):
    """The routes, for every method."""

    def add_routes(self, router: APIRouter, api: Api) -> None:
        for path in ABSENT:
            router.add_api_route(path, refuse, methods=["GET", "HEAD", "POST"], include_in_schema=False)


async def refuse(request: Request) -> Response:
    """Raise the error of a route that the server does not have."""
    path = request.scope["route"].path
    raise ApiError(404, f"This server has no {path}: {ABSENT[path]}.", code="unsupported_endpoint")

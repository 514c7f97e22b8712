"""The small routes by which clients and platforms find out what answers here: ``/v1/models``, ``/ready`` and others."""

from __future__ import annotations

import time

from fastapi import APIRouter, Response

from minisgl import hookimpl
from minisgl.config import Config
from minisgl.server.app import GET_OR_HEAD, Api
from minisgl.server.extension import HttpExtension
from minisgl.server.generate import Json
from minisgl.utils.version import __version__


@hookimpl
def minisgl_http(config: Config) -> HttpExtension:
    return About()


class About(HttpExtension):
    """The routes. The probes need no API key: they tell the version, and whether the server can answer."""

    def add_routes(self, router: APIRouter, api: Api) -> None:
        started = int(time.time())

        def model_card() -> dict[str, object]:
            if api.dispatcher.spec is None:  # clients take a model card as the sign that the server is ready
                raise api.dispatcher.unavailable()
            card = {"id": api.model, "object": "model", "created": started, "owned_by": "minisgl"}
            return {**card, "max_model_len": api.dispatcher.max_seq_len}

        @router.api_route("/v1/models", methods=GET_OR_HEAD)
        async def models() -> Response:
            return Json({"object": "list", "data": [model_card()]})

        @router.api_route("/v1/models/{name:path}", methods=GET_OR_HEAD)
        async def model(name: str) -> Response:
            api.check_model(name)
            return Json(model_card())

    def add_probes(self, router: APIRouter, api: Api) -> None:
        @router.api_route("/", methods=GET_OR_HEAD)
        async def root() -> Response:
            return Json({"name": "minisgl", "version": __version__, "api": "/v1", "health": "/health"})

        @router.api_route("/version", methods=GET_OR_HEAD)
        async def version() -> Response:
            return Json({"version": __version__})

        @router.api_route("/ready", methods=GET_OR_HEAD)
        async def ready() -> Response:
            api.check_healthy()
            api.dispatcher.check_open(1)
            return Json({"status": "ready"})

        @router.api_route("/ping", methods=[*GET_OR_HEAD, "POST"])
        async def ping() -> Response:
            """Answer as ``/health`` does, under the name that Amazon SageMaker asks for."""
            api.check_healthy()
            return Json({"status": "ok"})

"""The small routes by which clients and platforms find out what answers here: ``/``, ``/version`` and ``/ping``."""

from __future__ import annotations

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
    """The routes. They need no API key: they tell the version, and whether the server can answer."""

    def add_probes(self, router: APIRouter, api: Api) -> None:
        @router.api_route("/", methods=GET_OR_HEAD)
        async def root() -> Response:
            return Json({"name": "minisgl", "version": __version__, "api": "/v1", "health": "/health"})

        @router.api_route("/version", methods=GET_OR_HEAD)
        async def version() -> Response:
            return Json({"version": __version__})

        @router.api_route("/ping", methods=[*GET_OR_HEAD, "POST"])
        async def ping() -> Response:
            """Answer as ``/health`` does, under the name that Amazon SageMaker asks for."""
            api.check_healthy()
            return Json({"status": "ok"})

"""What a router asks a server: ``/server_info``, ``/model_info``, ``/get_load`` and ``/v1/loads``.

The names of the fields are SGLang's, so that routers made for SGLang understand them. A field that minisgl has no value
for is left out. ``default_sampling_params`` in ``/model_info`` is minisgl's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Response

from minisgl import hookimpl
from minisgl.config import Config
from minisgl.core import EngineSpec
from minisgl.models.resolve import resolve_model
from minisgl.plugins.http.apis.queries import ask_stats
from minisgl.server.app import GET_OR_HEAD, Api
from minisgl.server.extension import HttpExtension, Stats
from minisgl.server.generate import Json
from minisgl.utils.version import __version__


@hookimpl
def minisgl_http(config: Config) -> HttpExtension:
    return RouterRoutes(config)


class RouterRoutes(HttpExtension):
    """The routes for routers."""

    def __init__(self, config: Config):
        self._info = ServerInfo.of(config)

    def add_routes(self, router: APIRouter, api: Api) -> None:
        dispatcher = api.dispatcher

        @router.api_route("/server_info", methods=GET_OR_HEAD)
        async def read_server_info() -> Response:
            dispatcher.check_open()
            assert dispatcher.spec is not None
            return Json(server_info(self._info, api.model, dispatcher.spec))

        @router.api_route("/model_info", methods=GET_OR_HEAD)
        async def read_model_info() -> Response:
            return Json(model_info(self._info, api.sampling_defaults))

        @router.api_route("/get_load", methods=GET_OR_HEAD)
        async def read_request_loads() -> Response:
            stats = await ask_stats(dispatcher)
            assert dispatcher.spec is not None
            return Json(request_loads(dispatcher.spec, stats))

        @router.api_route("/v1/loads", methods=GET_OR_HEAD)
        async def read_loads() -> Response:
            stats = await ask_stats(dispatcher)
            assert dispatcher.spec is not None
            return Json(loads(dispatcher.spec, stats))


@dataclass(frozen=True)
class ServerInfo:
    """Facts about a server that do not change: the model's path, architectures and type, and some options."""

    model_path: str = ""
    architectures: tuple[str, ...] = ()
    model_type: str = ""
    tp: int = 1
    dtype: str = "auto"
    device: str = "auto"
    max_prefill_tokens: int = 0
    max_queued: int = 0

    @staticmethod
    def of(config: Config) -> ServerInfo:
        """Return the facts about a server with these options."""
        path = resolve_model(config.model)
        file = path / "config.json" if path.is_dir() else path
        model = json.loads(file.read_text("utf-8"))
        return ServerInfo(
            model_path=str(path),
            architectures=(config.architecture,) if config.architecture else tuple(model.get("architectures") or ()),
            model_type=str(model.get("model_type", "")),
            tp=config.tp,
            dtype=config.dtype,
            device=config.device,
            max_prefill_tokens=config.max_prefill_tokens,
            max_queued=config.server.max_queued,
        )


def server_info(info: ServerInfo, model: str, spec: EngineSpec) -> dict[str, Any]:
    """Return the answer of ``/server_info``. ``model`` is the model's name in the API."""
    return {
        "model_path": info.model_path,
        "tokenizer_path": info.model_path,
        "served_model_name": model,
        "tp_size": info.tp,
        "dp_size": 1,
        "pp_size": 1,
        "dtype": info.dtype,
        "device": info.device,
        "context_length": spec.max_seq_len,
        "page_size": spec.page_size,
        "chunked_prefill_size": info.max_prefill_tokens,
        "max_running_requests": spec.max_running_requests,
        "max_queued_requests": info.max_queued,
        "max_total_num_tokens": spec.page_size * spec.num_pages,
        "max_req_input_len": spec.max_tokens_per_request - 1,
        "version": __version__,
    }


def model_info(info: ServerInfo, sampling_defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer of ``/model_info``.

    ``sampling_defaults`` are the model's values of sampling parameters that a request leaves out, by name.
    """
    return {
        "model_path": info.model_path,
        "tokenizer_path": info.model_path,
        "is_generation": True,
        "preferred_sampling_params": None,
        "default_sampling_params": dict(sampling_defaults),
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": info.model_type,
        "architectures": list(info.architectures),
    }


def _used_tokens(spec: EngineSpec, stats: Stats) -> int:
    """Return the tokens of the KV pages that can't be allocated now: neither free nor evictable."""
    count = stats.values
    return spec.page_size * int(count["num_pages"] - count["num_free_pages"] - count["num_evictable_pages"])


def request_loads(spec: EngineSpec, stats: Stats) -> list[dict[str, int]]:
    """Return the answer of ``/get_load``: one entry, because a server has one data-parallel rank.

    ``num_tokens`` are the tokens of the KV pages that running requests use.
    """
    waiting = int(stats.values["num_waiting_reqs"])
    return [
        {
            "dp_rank": 0,
            "num_reqs": int(stats.values["num_running_reqs"]) + waiting,
            "num_waiting_reqs": waiting,
            "num_tokens": _used_tokens(spec, stats),
        }
    ]


def loads(spec: EngineSpec, stats: Stats) -> dict[str, Any]:
    """Return the answer of ``/v1/loads``: one entry, because a server has one data-parallel rank."""
    running, waiting = int(stats.values["num_running_reqs"]), int(stats.values["num_waiting_reqs"])
    capacity, used = spec.page_size * spec.num_pages, _used_tokens(spec, stats)
    prompt_tokens = stats.values["prompt_tokens"]
    return {
        "timestamp": datetime.now(UTC).isoformat(),
        "version": __version__,
        "dp_rank_count": 1,
        "loads": [
            {
                "dp_rank": 0,
                "num_running_reqs": running,
                "num_waiting_reqs": waiting,
                "num_total_reqs": running + waiting,
                "num_used_tokens": used,
                "max_total_num_tokens": capacity,
                "token_usage": round(used / capacity, 4),
                "cache_hit_rate": round(stats.values["cached_prompt_tokens"] / max(prompt_tokens, 1), 4),
                "utilization": round(running / spec.max_running_requests, 4),
                "max_running_requests": spec.max_running_requests,
            }
        ],
    }

"""What routers ask a server: ``/server_info``, ``/model_info``, ``/get_load``, ``/v1/loads``, with SGLang's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from openai import OpenAI

from minisgl.config import Config, ServerConfig
from minisgl.core import EngineSpec
from minisgl.plugins.http.server_info import ServerInfo, model_info, server_info
from minisgl.testing.serving import Server

pytestmark = pytest.mark.xdist_group("tutor")  # one process: the server starts once


def test_info_of_a_model() -> None:
    info = ServerInfo.of(Config(model="tutor", tp=2, max_prefill_tokens=100, server=ServerConfig(max_queued=7)))
    spec = EngineSpec(page_size=16, num_pages=64, max_running_requests=8, max_seq_len=512, vocab_size=320)
    answer = server_info(info, "tutor", spec)
    assert answer["tp_size"] == 2
    assert answer["dp_size"] == answer["pp_size"] == 1
    assert answer["served_model_name"] == "tutor"
    assert answer["model_path"].endswith("tutor")
    assert (answer["context_length"], answer["page_size"], answer["max_total_num_tokens"]) == (512, 16, 1024)
    assert (answer["chunked_prefill_size"], answer["max_queued_requests"], answer["max_running_requests"]) == (
        100,
        7,
        8,
    )
    assert model_info(info, {})["architectures"] == ["Qwen3ForCausalLM"]
    assert model_info(info, {})["model_type"] == "qwen3"
    assert model_info(info, {})["is_generation"] is True


def test_an_architecture_option_is_reported() -> None:
    assert ServerInfo.of(Config(model="tutor", architecture="Mine")).architectures == ("Mine",)


def test_loads(run_app: Callable[..., None]) -> None:
    async def test(server: Any) -> None:
        server.counts |= {"num_running_reqs": 2.0, "num_waiting_reqs": 3.0, "num_free_pages": 20.0}
        server.counts |= {"num_evictable_pages": 12.0, "prompt_tokens": 40.0, "cached_prompt_tokens": 10.0}
        async with server.client() as client:
            [load] = (await client.get("/get_load")).json()
            assert load == {"dp_rank": 0, "num_reqs": 5, "num_waiting_reqs": 3, "num_tokens": 16 * (64 - 20 - 12)}
            answer = (await client.get("/v1/loads?include=core,disagg,queues,memory")).json()
            assert answer["dp_rank_count"] == 1
            [load] = answer["loads"]
            assert (load["num_running_reqs"], load["num_waiting_reqs"], load["num_total_reqs"]) == (2, 3, 5)
            assert (load["num_used_tokens"], load["max_total_num_tokens"], load["token_usage"]) == (512, 1024, 0.5)
            assert (load["cache_hit_rate"], load["utilization"]) == (0.25, 0.25)

    run_app(test)


def test_no_model_card_while_the_server_starts(run_app: Callable[..., None]) -> None:
    """Clients wait for ``/v1/models`` until a server is ready, and the length of requests is not known before."""

    async def test(server: Any) -> None:
        spec, server.dispatcher.spec = server.dispatcher.spec, None
        server.dispatcher.reason = "The server is starting."
        async with server.client() as client:
            for path in ("/v1/models", "/v1/models/m"):
                answer = await client.get(path)
                assert answer.status_code == 503
                assert answer.json()["error"]["message"] == "The server is starting."
            server.dispatcher.spec = spec
            assert (await client.get("/v1/models")).json()["data"][0]["max_model_len"] == 512

    run_app(test)


@pytest.mark.parametrize("path", ["/server_info", "/model_info", "/get_load", "/v1/loads"])
def test_infos_need_the_key(run_app: Callable[..., None], path: str) -> None:
    async def test(server: Any) -> None:
        async with server.client() as client:
            assert (await client.get(path)).status_code == 401
            answer = await client.get(path, headers={"Authorization": "Bearer secret"})
            assert answer.status_code == 200
            assert (await client.head(path, headers={"Authorization": "Bearer secret"})).status_code == 200

    run_app(test, api_key="secret")


def test_infos_of_a_real_server(tutor: Server, client: OpenAI) -> None:
    answer: dict[str, Any] = httpx.get(f"{tutor.url}/server_info").json()
    assert answer["max_total_num_tokens"] == 512 * 16
    assert answer["context_length"] == client.models.list().data[0].model_dump()["max_model_len"]
    assert httpx.get(f"{tutor.url}/get_load").json()[0]["num_reqs"] == 0

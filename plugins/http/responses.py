"""OpenAI's ``POST /v1/responses``: chats in other words, and the responses that the server stores.

The body becomes a chat (`minisgl.plugins.http.apis.responses_request`), and its answer becomes items
(`minisgl.plugins.http.apis.responses_events`). With ``server.responses_store=memory``, responses are stored, and the
next request may continue one (`minisgl.plugins.http.apis.responses_store`).
"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from minisgl import hookimpl
from minisgl.config import Config
from minisgl.plugins.http.apis.parameters import FullFormat
from minisgl.plugins.http.apis.responses_events import ResponsesBuilder
from minisgl.plugins.http.apis.responses_request import ResponsesRequest, translate
from minisgl.plugins.http.apis.responses_store import ResponseStore
from minisgl.plugins.http.apis.translation import Translation
from minisgl.server.app import Api
from minisgl.server.errors import ApiError
from minisgl.server.extension import HttpExtension
from minisgl.server.generate import Json
from minisgl.server.protocol import Chat

NO_STORE = "is not supported by this server, which stores no responses: start it with server.responses_store=memory."


@hookimpl
def minisgl_http(config: Config) -> HttpExtension:
    return ResponsesRoutes(ResponseStore() if config.server.responses_store == "memory" else None)


class ResponsesRoutes(FullFormat):
    """The routes. ``store`` is None if responses are not stored."""

    options = ("responses_store",)

    def __init__(self, store: ResponseStore | None):
        self._store = store

    def add_routes(self, router: APIRouter, api: Api) -> None:
        store = self._store

        def convert(body: ResponsesRequest) -> tuple[list[dict[str, Any]], Translation, Chat]:
            history = self._history(body)
            translation = translate(body, history)
            return history, translation, translation.read(api)

        @router.post("/v1/responses")
        async def responses(request: Request) -> Response:
            body, (history, translation, chat) = await api.read(request, ResponsesRequest, convert)
            api.check_model(body.model)
            keeps = store is not None and body.store is not False

            def keep(response: dict[str, Any]) -> None:
                if store is not None and keeps:
                    store.add(response, [*history, *body.input_items])

            builder = ResponsesBuilder(api.model, body, api.sampling_defaults, translation.rename, keeps, keep)
            try:
                return await api.chat(request, chat, builder)
            except ApiError as error:
                raise translation.rename(error) from None

        if store is not None:
            _add_store_routes(router, store)

    def _history(self, body: ResponsesRequest) -> list[dict[str, Any]]:
        """Return the items of the conversation that a body continues. Raise `ApiError`."""
        if self._store is None:
            for name, given in (("previous_response_id", body.previous_response_id), ("store", body.store)):
                if given:
                    value = "" if name == "previous_response_id" else ": true"
                    raise ApiError(400, f"{name}{value} {NO_STORE}", name, "unsupported_parameter")
            return []
        if body.previous_response_id is None:
            return []
        found = self._store.get(body.previous_response_id, "previous_response_id")
        items: list[dict[str, Any]] = msgspec.json.decode(found.items)
        return items


def _add_store_routes(router: APIRouter, store: ResponseStore) -> None:
    @router.get("/v1/responses/{response_id}")
    async def retrieve(response_id: str) -> Response:
        return Response(store.get(response_id).response, media_type="application/json")

    @router.delete("/v1/responses/{response_id}")
    async def delete(response_id: str) -> Response:
        store.remove(response_id)
        return Json({"id": response_id, "object": "response", "deleted": True})

    @router.get("/v1/responses/{response_id}/input_items")
    async def input_items(response_id: str) -> Response:
        """List the items that the response was made from, the last first, as OpenAI does."""
        found = store.get(response_id)
        items = list(reversed(msgspec.json.decode(found.items)[: found.num_input]))
        ends = {"first_id": items[0].get("id"), "last_id": items[-1].get("id")} if items else {}
        return Json({"object": "list", "data": items, "has_more": False, **ends})

"""Recorded requests in a form that is kept in the repository: short texts, no random ids, few headers."""

from __future__ import annotations

import json
import re
from typing import Any

from .catalog import Client

__all__ = ["read_payloads", "shape", "to_payloads", "write_payloads"]

LONGEST = 160
"""Longer texts are replaced: they are the prompts of other projects."""
HEADERS = frozenset({"accept", "anthropic-beta", "anthropic-version", "content-type", "openai-beta"})
"""The headers that are kept."""
_RANDOM = re.compile(r"\b([a-z]{2,12})[-_][A-Za-z0-9]{16,}\b|\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")


def to_payloads(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the requests with a body in their normal form, each form once."""
    found: dict[str, dict[str, Any]] = {}
    for request in requests:
        if request["body"]:
            ids: dict[str, str] = {}
            headers = {name: value for name, value in sorted(request["headers"].items()) if name in HEADERS}
            body = _normal(json.loads(request["body"]), ids)
            payload = {"path": request["path"], "headers": headers, "body": body}
            found.setdefault(json.dumps(shape(payload)), payload)
    return list(found.values())


def _normal(value: Any, ids: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _normal(each, ids) for key, each in value.items()}
    if isinstance(value, list):
        return [_normal(each, ids) for each in value]
    if not isinstance(value, str):
        return value
    if len(value) > LONGEST:
        return "Answer in a few words. What is a KV cache?"
    return _RANDOM.sub(lambda found: ids.setdefault(found[0], f"{found[1] or 'id'}_{len(ids) + 1}"), value)


def shape(value: Any) -> Any:
    """Return the structure of a JSON value: its keys, and its leaves except texts."""
    if isinstance(value, dict):
        return {key: shape(each) for key, each in value.items()}
    if isinstance(value, list):
        return [shape(each) for each in value]
    return "…" if isinstance(value, str) else value


def read_payloads(client: Client) -> list[dict[str, Any]]:
    return json.loads(client.payloads.read_text("utf-8"))


def write_payloads(client: Client, payloads: list[dict[str, Any]]) -> None:
    client.payloads.write_text(json.dumps(payloads, indent=1, ensure_ascii=False) + "\n", "utf-8")

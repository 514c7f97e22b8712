"""Real clients against a real server: `make check-clients` installs them and runs these tests.

A client's script (``scripts/``) runs in the client's environment. One check for each kind of case compares what the
script reports. The requests that a client sends are kept in ``payloads/``, and `test_payloads` replays them where no
client is installed. ``MINISGL_RECORD=1`` writes them again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import pytest

from .catalog import CLIENTS, ROOT, Client, table
from .conftest import Ran
from .normalize import read_payloads, shape, to_payloads, write_payloads

pytestmark = [pytest.mark.xdist_group("clients"), pytest.mark.timeout(900)]
RECORD = bool(os.environ.get("MINISGL_RECORD"))
Check = Callable[[Any, str], None]


def is_answer(value: Any, answer: str) -> None:
    """Check a text, or the pieces of a stream: the answer is that of a plain request."""
    assert (value if isinstance(value, str) else "".join(value)) == answer


def is_person(value: Any, answer: str) -> None:
    assert list(value) == ["name", "age"]
    assert len(value["name"]) <= 8 and 0 <= value["age"] <= 9


def is_count(value: Any, answer: str) -> None:
    """Check the tokens of a prompt: counted before, and as the answer's usage."""
    assert value[0] == value[1] > 0


def begins_object(value: Any, answer: str) -> None:
    assert re.match(r'\{("|\}$)', value), value  # `max_tokens` may cut it


def is_call(value: Any, answer: str) -> None:
    assert value["name"] == "add"
    assert value["arguments"]["a"] in (1, 2) and value["arguments"]["b"] in (3, 4)


def is_turn(value: Any, answer: str) -> None:
    """Check a tool's call, and the text that follows its result."""
    is_call(value["call"], answer)
    assert value["text"]


def is_agents_turn(value: Any, answer: str) -> None:
    """Check a whole turn of which the model decides each step: it calls the tool, and uses its result."""
    assert value == {"call": {"name": "calculator", "arguments": {"expression": "37 * 48"}}, "text": "37 * 48 = 1776."}


def is_text(value: Any, answer: str) -> None:
    assert isinstance(value, str) and value


def is_close(value: Any, answer: str) -> None:
    assert value < 1e-3


def is_refused(value: Any, answer: str) -> None:
    assert value == "refused"


def is_measured(value: Any, answer: str) -> None:
    assert value == [8, 8, 8]


CHECKS: dict[str, Check] = {
    "chat": is_answer,
    "stream": is_answer,
    "vllm_provider": is_answer,
    "schema": is_person,
    "streamed_schema": is_person,
    "json_object": begins_object,
    "json_in_markdown": is_text,
    "parallel_tools": is_text,
    "streamed_agent": is_agents_turn,
    "counted": is_count,
    "schema_by_tool": is_person,
    "schema_by_strict_tool": is_person,
    "responses_schema": is_person,
    "responses": is_answer,
    "tools": is_call,
    "named_tool": is_call,
    "streamed_tools": is_call,
    "agent": is_turn,
    "context_overflow": is_refused,
    "loglikelihood": is_close,
    "completion": is_text,
    "measured_chat": is_measured,
}
"""Case → the check of the value that it reports."""


def installed(client: Client) -> Any:
    """Return the client as a parameter, skipped where it is not installed."""
    skip = pytest.mark.skipif(not client.installed, reason="not installed: make check-clients")
    return pytest.param(client, marks=skip, id=client.name)


def cases() -> list[Any]:
    found = []
    for client in CLIENTS.values():
        for case in client.cases:
            marks = list(installed(client).marks)
            if case in client.broken:
                marks.append(pytest.mark.xfail(reason=client.broken[case], strict=True))
            found.append(pytest.param(client, case, marks=marks, id=f"{client.name}-{case}"))
    return found


@pytest.mark.parametrize(("client", "case"), cases())
def test_case(client: Client, case: str, run_client: Callable[[Client], Ran], answer: str) -> None:
    result = run_client(client).results[case]
    assert "error" not in result, result["error"]
    CHECKS[case](result["value"], answer)


@pytest.mark.parametrize("client", list(map(installed, CLIENTS.values())))
def test_cases_and_payloads(client: Client, run_client: Callable[[Client], Ran]) -> None:
    """The script has the cases of clients.toml, and the kept requests are of the form that the client sends."""
    ran = run_client(client)
    assert tuple(ran.results) == client.cases
    sent = to_payloads(ran.requests)
    if RECORD:
        write_payloads(client, sent)
    assert list(map(shape, read_payloads(client))) == list(map(shape, sent)), "record again: MINISGL_RECORD=1"


def test_table() -> None:
    """The page has the versions that are pinned and the cases that pass."""
    page = ROOT / "docs" / "clients.md"
    text = page.read_text("utf-8")
    if RECORD:
        head, _, tail = text.partition("| client |")
        text = head + table() + "\n\n" + tail.partition("\n\n")[2]
        page.write_text(text)
    assert f"\n{table()}\n" in text, "write the table again: MINISGL_RECORD=1"

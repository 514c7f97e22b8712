"""The exact router reads prompts as the servers do: it computes the hashes of the blocks that they publish."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from starlette.datastructures import Headers

from minisgl.cluster.proxy import PromptView
from minisgl.message.kv_events import block_hashes, root_hash
from minisgl.models.resolve import resolve_model
from minisgl.plugins.router import exact
from minisgl.plugins.router.exact import MAX_PENDING, PromptReader
from minisgl.tokenizer.tokenizer import Tokenizer

SIZE = 4
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[PromptReader]:
    monkeypatch.setattr(exact, "READ_SECONDS", 60.0)  # a busy machine may take long
    reader = PromptReader(str(resolve_model("tutor")), False, 7, "key")
    reader.begin(SIZE, 512)
    yield reader
    reader.close()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = Tokenizer.from_dir(resolve_model("tutor"))
    assert found is not None
    return found


def read(reader: PromptReader, path: str, body: object, key: str = "key") -> PromptView:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return asyncio.run(reader(path, Headers({"authorization": f"Bearer {key}"}), data))


def hashes_of(tokens: list[int], salt: bytes = b"") -> list[int]:
    whole = np.array(tokens[: len(tokens) // SIZE * SIZE], np.int32)
    return block_hashes(root_hash(7), whole, SIZE, salt)


def test_chat(reader: PromptReader, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "What is a KV cache? Special: <|im_end|>"}]
    tokens = tokenizer.chat(messages)
    view = read(reader, CHAT, {"messages": messages, "max_tokens": 9})
    assert view == PromptView(hashes_of(tokens), len(tokens), 9)
    view = read(reader, CHAT, {"messages": messages, "cache_salt": "ä"})
    assert view == PromptView(hashes_of(tokens, "ä".encode()), len(tokens), 512 - len(tokens))


def test_completions(reader: PromptReader, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("Once upon a time there was a page table.")
    assert read(reader, COMPLETIONS, {"prompt": "Once upon a time there was a page table."}) == PromptView(
        hashes_of(tokens), len(tokens), 16
    )
    assert read(reader, COMPLETIONS, {"prompt": [5, 6, 7, 8, 9], "max_tokens": 2}) == PromptView(
        hashes_of([5, 6, 7, 8]), 5, 2
    )


def test_several_prompts(reader: PromptReader) -> None:
    """They go to one replica: the one that has the first."""
    view = read(reader, COMPLETIONS, {"prompt": [[1, 2, 3, 4], [5, 6]]})
    assert view == PromptView(hashes_of([1, 2, 3, 4]), 6, 16)


@pytest.mark.parametrize("body", [b"no json", {"messages": 3}, {"messages": [], "unknown": 1}, {"prompt": []}, {}])
def test_requests_that_the_servers_refuse(reader: PromptReader, body: object) -> None:
    assert read(reader, CHAT, body) == PromptView(prompt_tokens=1)
    assert read(reader, COMPLETIONS, body) == PromptView(prompt_tokens=1)
    assert reader.by_load == 0


def test_a_prompt_that_is_too_long_is_not_tokenised(reader: PromptReader) -> None:
    assert read(reader, COMPLETIONS, {"prompt": "word " * 20_000}) == PromptView(prompt_tokens=1)


def test_routed_by_load(reader: PromptReader) -> None:
    """A request without the key is refused anyway, and too many bytes would take too long."""
    assert read(reader, CHAT, b"x" * 40, key="wrong") == PromptView(prompt_tokens=10)
    assert reader.by_load == 0
    assert read(reader, CHAT, b"x" * (MAX_PENDING + 4)) == PromptView(prompt_tokens=MAX_PENDING // 4 + 1)
    assert reader.by_load == 1
    fresh = PromptReader(str(resolve_model("tutor")), False, 7, None)
    assert read(fresh, COMPLETIONS, {"prompt": "x"}).block_hashes == ()
    fresh.close()


def test_many_at_once(reader: PromptReader) -> None:
    async def body() -> None:
        bodies = [json.dumps({"prompt": [i, i + 1, i + 2, i + 3]}).encode() for i in range(50)]
        headers = Headers({"authorization": "Bearer key"})
        views = await asyncio.gather(*(reader(COMPLETIONS, headers, data) for data in bodies))
        assert [view.block_hashes for view in views] == [hashes_of([i, i + 1, i + 2, i + 3]) for i in range(50)]

    asyncio.run(body())


def test_a_prompt_that_takes_long_holds_no_other(reader: PromptReader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that wait for it are routed by load after `READ_SECONDS`, and are not read later."""
    assert read(reader, COMPLETIONS, {"prompt": [1, 2, 3, 4]}).block_hashes
    go, began, original = threading.Event(), [], reader._read

    def slow(path: str, body: bytes) -> PromptView:
        began.append(body)
        go.wait(60)
        return original(path, body)

    monkeypatch.setattr(reader, "_read", slow)
    monkeypatch.setattr(exact, "READ_SECONDS", 0.05)
    bodies = [json.dumps({"prompt": [1, 2, 3, index]}).encode() for index in range(4)]

    async def read_all() -> list[PromptView]:
        headers = Headers({"authorization": "Bearer key"})
        return await asyncio.gather(*(reader(COMPLETIONS, headers, body) for body in bodies))

    assert asyncio.run(read_all()) == [PromptView(prompt_tokens=len(body) // 4) for body in bodies]
    assert reader.by_load == 4
    go.set()
    monkeypatch.setattr(exact, "READ_SECONDS", 60.0)
    assert read(reader, COMPLETIONS, {"prompt": [1, 2, 3, 9]}).block_hashes == hashes_of([1, 2, 3, 9])
    assert len(began) == 2 and began[0] == bodies[0]

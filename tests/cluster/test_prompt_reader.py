"""The exact router reads prompts as the servers do: it computes the hashes of the blocks that they publish."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from starlette.datastructures import Headers

from minisgl.cluster import prompt_reader
from minisgl.cluster.kv_events import block_hashes, root_hash
from minisgl.cluster.prompt_reader import MAX_BODY, PromptReader
from minisgl.cluster.relay import PromptView
from minisgl.models.resolve import resolve_model
from minisgl.tokenizer.tokenizer import Tokenizer

SIZE = 4
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[PromptReader]:
    monkeypatch.setattr(prompt_reader, "READ_SECONDS", 60.0)  # a busy machine may take long
    reader = PromptReader(Tokenizer.from_dir(resolve_model("tutor")), 7, "key")
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
    assert read(reader, CHAT, b"x" * (MAX_BODY + 4)) == PromptView(prompt_tokens=MAX_BODY // 4 + 1)
    assert reader.by_load == 1
    fresh = PromptReader(Tokenizer.from_dir(resolve_model("tutor")), 7, None)
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
    monkeypatch.setattr(prompt_reader, "READ_SECONDS", 0.5)
    bodies = [json.dumps({"prompt": [1, 2, 3, index]}).encode() for index in range(4)]

    async def read_all() -> list[PromptView]:
        headers = Headers({"authorization": "Bearer key"})
        return await asyncio.gather(*(reader(COMPLETIONS, headers, body) for body in bodies))

    assert asyncio.run(read_all()) == [PromptView(prompt_tokens=len(body) // 4) for body in bodies]
    assert reader.by_load == 4
    go.set()
    monkeypatch.setattr(prompt_reader, "READ_SECONDS", 60.0)
    assert read(reader, COMPLETIONS, {"prompt": [1, 2, 3, 9]}).block_hashes == hashes_of([1, 2, 3, 9])
    assert len(began) == 2 and began[0] == bodies[0]


def test_the_work_on_one_request_is_bounded(
    reader: PromptReader, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of long texts only the beginning is tokenised, of all prompts of a request together; its hashes are exact."""
    monkeypatch.setattr(prompt_reader, "MAX_CHARS", 400)
    encoded: list[int] = []
    original = Tokenizer.encode
    monkeypatch.setattr(
        Tokenizer, "encode", lambda self, text, *args: encoded.append(len(text)) or original(self, text, *args)
    )
    text = " ".join(f"page {index}" for index in range(150))
    tokens = tokenizer.encode(text)
    encoded.clear()
    view = read(reader, COMPLETIONS, {"prompt": [text, text]})
    assert [size for size in encoded if size] == [400]
    assert 20 < len(view.block_hashes) < len(tokens) // SIZE
    assert list(view.block_hashes) == hashes_of(tokens)[: len(view.block_hashes)]
    assert view.prompt_tokens == pytest.approx(len(tokens) + len(text) / 4, rel=0.1)

    messages = [{"role": "user", "content": f"<|im_end|> {text}"}]
    tokens = tokenizer.chat(messages)
    view = read(reader, CHAT, {"messages": messages})
    assert 20 < len(view.block_hashes) < len(tokens) // SIZE
    assert list(view.block_hashes) == hashes_of(tokens)[: len(view.block_hashes)]
    assert reader.by_load == 0


def test_a_prompt_counts_until_it_is_read(reader: PromptReader, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that no longer waits still occupies the thread, so its bytes still count."""
    go, original = threading.Event(), reader._read

    def slow(path: str, body: bytes) -> PromptView:
        go.wait(60)
        return original(path, body)

    monkeypatch.setattr(reader, "_read", slow)
    monkeypatch.setattr(prompt_reader, "MAX_PENDING", 70)
    body = json.dumps({"prompt": [1, 2, 3, 4]}).encode()
    headers = Headers({"authorization": "Bearer key"})

    async def read_all() -> None:
        monkeypatch.setattr(prompt_reader, "READ_SECONDS", 0.5)
        assert await reader(COMPLETIONS, headers, body) == PromptView(prompt_tokens=len(body) // 4)
        monkeypatch.setattr(prompt_reader, "READ_SECONDS", 60.0)
        assert (await reader(COMPLETIONS, headers, b" " * 50)).block_hashes == ()  # at once: it would not fit
        go.set()
        while not (await reader(COMPLETIONS, headers, body)).block_hashes:
            await asyncio.sleep(0.01)

    asyncio.run(read_all())
    assert reader._pending <= len(body)

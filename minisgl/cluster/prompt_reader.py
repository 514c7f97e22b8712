"""Reads prompts for a router: the hashes of their blocks, as the servers publish them in their KV events.

The router tokenises prompts with the code of the servers' tokenizer processes, in one thread. Work in a thread can't be
stopped, so the work on each request is bounded: a body above `MAX_BODY` is not read, and of the texts of a request only
the first `MAX_CHARS` characters are tokenised. A prefix is what routing is about, so the rest of a long prompt matters
little: its length is estimated.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from starlette.datastructures import Headers

from minisgl.cluster.http_server import load_some
from minisgl.cluster.kv_events import block_hashes, root_hash
from minisgl.cluster.relay import PromptView
from minisgl.config import Config
from minisgl.core import I32, InvalidRequestError
from minisgl.message import ChatPrompt, Prompt, TextPrompt, TokensPrompt, unpack_ids
from minisgl.server.app import is_authorized
from minisgl.server.errors import ApiError
from minisgl.server.extension import FOLDER, shipped
from minisgl.server.parsing import parse
from minisgl.server.protocol import ChatRequest
from minisgl.tokenizer.tokenizer import Tokenizer

log = logging.getLogger(__name__)

MAX_PENDING = 4 << 20
"""Bytes of bodies that may wait to be tokenised. A request above it is routed by load."""
MAX_BODY = 1 << 20
"""The largest size of a body, in bytes, whose prompt is read. A request with a larger one is routed by load."""
MAX_CHARS = 1 << 18
"""Characters of a request's texts that are tokenised, which takes about 0.3 s. A longer text ends there."""
CUT_TOKENS = 16
"""Tokens at the end of a text that was cut which may be other ones in the whole text."""
MAX_PROMPTS = 16
"""The largest number of prompts of one request that the router looks at. They go to one replica."""
READ_SECONDS = 1.0
"""Seconds in which a prompt must be tokenised, with the wait for other prompts. Else the request is routed by load."""
FIRST = ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "first"}]}')
"""A request whose prompt is read before any other: the first one takes longer, for imports and the chat template."""


class PromptReader:
    """Reads the prompts of requests: their length, and the hashes of the first prompt's blocks.

    ``tokenizer`` is that of the servers, or None. ``hash_seed`` is that of the KV events. The prompt of a request
    without ``api_key`` is not read.
    """

    def __init__(self, tokenizer: Tokenizer | None, hash_seed: int, api_key: str | None):
        self.by_load = 0
        """Requests that could not be read. They are routed by load."""
        self._root = root_hash(hash_seed)
        self._api_key = api_key
        self._tokenizer = tokenizer
        self._checks = [extension.check_fields for extension in load_some(Config(), "bounds", "compatible")]
        # These bodies are known to the extensions of these names, if they are shipped.
        self._chat, self._completion = ChatRequest, None
        if "chat" in shipped():
            self._chat = importlib.import_module(f"{FOLDER}.apis.parameters").FullChatRequest
        if "completions" in shipped():
            self._completion = importlib.import_module(f"{FOLDER}.completions").CompletionRequest
        self._thread = ThreadPoolExecutor(1, "tokenize")
        self._pending = 0
        self.block_size = 0  # unknown, as long as no replica has been ready
        self._max_seq_len = 0

    def begin(self, block_size: int, max_seq_len: int) -> None:
        """Set the tokens of a block, and the largest length of a request in tokens."""
        self.block_size, self._max_seq_len = block_size, max_seq_len
        self._thread.submit(self._read, *FIRST)

    async def __call__(self, path: str, headers: Headers, body: bytes) -> PromptView:
        """Return the view of a request's prompt. A request that the servers will refuse has an empty one.

        The prompts of other clients may keep the thread busy, so this waits for `READ_SECONDS` at most. Then the work
        is cancelled unless it has begun.
        """
        unread = PromptView(prompt_tokens=len(body) // 4)
        if not is_authorized(headers.get("authorization", ""), self._api_key):
            return unread
        if not self.block_size or len(body) > MAX_BODY or self._pending + len(body) > MAX_PENDING:
            self.by_load += 1
            return unread
        loop = asyncio.get_running_loop()
        self._pending += len(body)
        work = self._thread.submit(self._read, path, body)
        # A prompt counts until the thread is done with it, also if its request no longer waits.
        work.add_done_callback(lambda _: self._release_in(loop, len(body)))
        try:
            async with asyncio.timeout(READ_SECONDS):
                return await asyncio.wrap_future(work)
        except ApiError:
            return PromptView(prompt_tokens=1)
        except TimeoutError:
            self.by_load += 1
            return unread
        except Exception:
            log.exception("a prompt can't be read")
            self.by_load += 1
            return unread

    def _release_in(self, loop: asyncio.AbstractEventLoop, size: int) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(self._release, size)

    def _release(self, size: int) -> None:
        self._pending -= size

    def _read(self, path: str, body: bytes) -> PromptView:
        """Return the view of a prompt. Raise `ApiError` if the request is invalid. Called in the thread."""
        if path.endswith("/chat/completions"):
            chat = parse(body, self._chat, self._checks)
            prompts: Sequence[Prompt] = [chat.to_prompt()]
            salt, max_tokens = getattr(chat, "cache_salt", None), chat.token_limit
        elif self._completion is None:
            raise ApiError(404, "The servers have no plain completions.")
        else:
            completion = parse(body, self._completion, self._checks)
            prompts = completion.to_prompts()[:MAX_PROMPTS]
            salt, max_tokens = completion.cache_salt, 16 if completion.max_tokens is None else completion.max_tokens
        found = self._tokenize(prompts)
        tokens, length = found[0]
        whole = tokens[: len(tokens) // self.block_size * self.block_size]
        salted = b"" if salt is None else salt.encode("utf-8", "surrogatepass")
        left = max(self._max_seq_len - length, 0)
        return PromptView(
            block_hashes(self._root, whole, self.block_size, salted),
            sum(each for _, each in found),
            left if max_tokens is None else min(max(max_tokens, 0), left),
        )

    def _tokenize(self, prompts: Sequence[Prompt]) -> list[tuple[I32, int]]:
        """Return the first tokens of each prompt, int32 ``[tokens]``, and its length, which may be an estimate.

        Raise `ApiError` if the servers will refuse a prompt.
        """
        left = MAX_CHARS
        found = []
        for prompt in prompts:
            try:
                tokens, length, used = self._tokenize_one(prompt, left)
            except InvalidRequestError as error:
                raise ApiError.from_invalid(error) from None
            if len(tokens) > self._max_seq_len:
                raise ApiError(400, f"The prompt has more than {self._max_seq_len} tokens.")
            found.append((tokens, length))
            left -= used
        return found

    def _tokenize_one(self, prompt: Prompt, most: int) -> tuple[I32, int, int]:
        """Return the first tokens of a prompt, its length, and how many of at most ``most`` characters were used."""
        if isinstance(prompt, TokensPrompt):
            tokens = unpack_ids(prompt.ids).astype(np.int32)
            return tokens, len(tokens), 0
        chars, ids = self._tokenize_text(prompt, most)
        if chars <= most:
            return np.array(ids, np.int32), len(ids), chars
        # Without a character to tokenise, four characters count as a token.
        length = int(len(ids) * chars / most) if most else chars // 4
        return np.array(ids[: max(len(ids) - CUT_TOKENS, 0)], np.int32), length, most

    def _tokenize_text(self, prompt: TextPrompt | ChatPrompt, most: int) -> tuple[int, list[int]]:
        """Return the number of characters of a text, and the tokens of the first ``most``."""
        if self._tokenizer is None:
            raise InvalidRequestError("prompt", "This model has no tokenizer.")
        if isinstance(prompt, TextPrompt):
            text = prompt.text
            return len(text), self._tokenizer.encode(text[:most], prompt.add_special_tokens) if text else []
        chat = self._tokenizer.render_prompt(prompt)
        return len(chat.text), self._tokenizer.encode_chat(chat.cut(most))

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

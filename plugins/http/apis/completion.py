"""The body of ``POST /v1/completions``, and its response: a plain completion, which may begin with the prompt.

With ``echo`` the prompt comes before the answer, with its log-probabilities if they are asked for. Evaluations score
texts in this way: they send ``echo``, ``logprobs`` and ``max_tokens`` 0 or 1. The engine always samples a token after a
prompt; with ``max_tokens: 0``, that token is not shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from minisgl.core import Finished
from minisgl.message import (
    Prompt,
    TextPrompt,
    TokensPrompt,
    num_ids,
    pack_ids,
)
from minisgl.plugins.http.apis.full_answer import (
    MIN_LOGPROB,
    FullBuilder,
    FullChoice,
    full_choice,
    vllm_prompt_logprobs,
)
from minisgl.plugins.http.apis.logprobs import PromptLogprob, TokenLogprob
from minisgl.plugins.http.apis.parameters import FullGenerateRequest
from minisgl.plugins.http.apis.queries import ask_text, ask_tokens, in_time
from minisgl.plugins.http.apis.token_ids import tokens_prompt
from minisgl.sampling_params import SamplingParams, too_long
from minisgl.server.dispatch import Dispatcher
from minisgl.server.errors import ApiError
from minisgl.server.generate import Choice

DEFAULT_MAX_TOKENS = 16
"""The default of ``max_tokens``, as in the OpenAI API."""


class CompletionRequest(FullGenerateRequest, kw_only=True):
    """The body of ``POST /v1/completions``."""

    prompt: Any
    logprobs: int | None = None
    echo: bool = False

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    def to_prompts(self) -> list[Prompt]:
        """Return ``prompt`` (a text, token ids, or a list of either) as a list of prompts. Raise `ApiError`."""
        return _to_prompts(self.prompt, self.num_kept_tokens)


def _to_prompts(prompt: Any, num_kept: int = 0) -> list[Prompt]:
    if isinstance(prompt, str):
        return [TextPrompt(prompt, num_kept_tokens=num_kept)]
    if isinstance(prompt, list) and prompt:
        if all(type(item) is int for item in prompt):
            return [tokens_prompt(prompt[-num_kept:], "prompt")]
        if all(isinstance(item, str) for item in prompt):
            return [TextPrompt(item, num_kept_tokens=num_kept) for item in prompt]
        if all(isinstance(item, list) and all(type(token) is int for token in item) for item in prompt):
            return [tokens_prompt(item[-num_kept:], "prompt") for item in prompt]
    elif prompt == []:
        raise ApiError(400, "The prompt is empty: it must have at least one token.", "prompt", "invalid_value")
    raise ApiError(
        400, "prompt must be a string, a list of token ids, a list of strings, or a list of these.", "prompt",
        "invalid_type",
    )  # fmt: skip


# ---- the response ----------------------------------------------------------------------------------------


class CompletionBuilder(FullBuilder):
    """Builds the responses of plain completions."""

    chat, id_prefix, kind, chunk_kind = False, "cmpl", "text_completion", "text_completion"

    def __init__(self, **options: Any):
        super().__init__(**options)
        self._offsets: dict[int, int] = {}  # with logprobs: the characters of each choice's tokens so far

    def full(self, choices: Sequence[Choice]) -> dict[str, Any]:
        response = super().full(choices)
        if self.prompt_logprobs:  # those of the first choice of a prompt, for all
            del response["prompt_logprobs"]
            for choice, body in zip(choices, response["choices"], strict=True):
                first = choices[choice.index - choice.index % self.n]
                body["prompt_logprobs"] = vllm_prompt_logprobs(first)
        return response

    def first_chunk(self, index: int) -> dict[str, Any] | None:
        return None

    def content(self, choice: Choice) -> dict[str, Any]:
        return {"text": choice.text}

    def delta(self, choice: Choice) -> dict[str, Any]:
        return {"text": choice.text}

    def usage(self, ends: Sequence[Finished | None]) -> dict[str, Any]:
        return {name: count for name, count in super().usage(ends).items() if name != "completion_tokens_details"}

    def format_logprobs(self, choice: Choice) -> dict[str, Any]:
        logprobs = full_choice(choice).logprobs
        offsets, offset = [], self._offsets.get(choice.index, 0)
        for token in logprobs:
            offsets.append(offset)
            offset += len(token.text)
        self._offsets[choice.index] = offset
        return {
            "tokens": [name_of(token) for token in logprobs],
            "token_logprobs": [max(token.logprob, MIN_LOGPROB) for token in logprobs],
            "top_logprobs": [
                {name_of(top): max(top.logprob, MIN_LOGPROB) for top in (*token.top, token)} for token in logprobs
            ],
            "text_offset": offsets,
        }


def name_of(token: TokenLogprob | PromptLogprob) -> str:
    """Return a name for a token: its text, or its bytes if they are not complete characters.

    The bytes keep the names of two such tokens different. Their texts, which contain U+FFFD, could be the same.
    """
    if "\ufffd" not in token.text:
        return token.text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.raw)


# ---- with the prompt -------------------------------------------------------------------------------------


class EchoedPrompt(NamedTuple):
    """The text of a prompt, and the texts of its tokens. Without a tokenizer, the text is empty."""

    text: str
    tokens: Sequence[str]


def echo_params(body: CompletionRequest, limit: int, defaults: Mapping[str, Any]) -> SamplingParams:
    """Return the sampling parameters of a completion with ``echo``. Raise `ApiError` for a wrong value.

    ``limit`` is the client's ``max_tokens``, which may be 0.
    """
    if body.logprobs is not None and body.prompt_logprobs is not None:
        raise ApiError(400, "echo with logprobs has the prompt's: leave out prompt_logprobs.", "prompt_logprobs")
    if body.logprobs is not None and body.stream:
        raise ApiError(400, "echo with logprobs is not available with stream: true.", "echo", "invalid_value")
    params = body.params(limit or 1, defaults)
    if limit <= 1 and params.grammar is None:
        # A single token ends the answer in any case. An end-of-sequence token would have no entry in the logprobs,
        # but clients take the last entry for that of the sampled token.
        params = msgspec.structs.replace(params, ignore_eos=True)
    prompt_logprobs = params.prompt_logprobs if body.logprobs is None else body.logprobs
    return msgspec.structs.replace(params, prompt_logprobs=prompt_logprobs)


async def read_prompts(dispatcher: Dispatcher, prompts: Sequence[Prompt], seconds: float | None) -> list[EchoedPrompt]:
    """Ask a tokenizer for the prompts' texts and tokens. Raise `ApiError`, such as a 504 after ``seconds``."""
    dispatcher.check_open()

    async def read(prompt: Prompt) -> EchoedPrompt:
        check_prompt_ids(prompt, dispatcher.max_seq_len)
        ids, texts = await ask_tokens(dispatcher, prompt, with_texts=True)
        if texts is None:
            return EchoedPrompt("", [f"token_id:{token}" for token in ids])
        if isinstance(prompt, TextPrompt) and not prompt.num_kept_tokens:
            return EchoedPrompt(prompt.text, texts)
        return EchoedPrompt(await ask_text(dispatcher, pack_ids(ids)), texts)

    async def read_all() -> list[EchoedPrompt]:
        return [await read(prompt) for prompt in prompts]

    return await in_time(read_all(), seconds)


def check_prompt_ids(prompt: Prompt, max_seq_len: int) -> None:
    """Raise `ApiError` for a prompt of more token ids than a request can have."""
    if isinstance(prompt, TokensPrompt) and num_ids(prompt.ids) > max_seq_len:
        raise ApiError.from_invalid(too_long("prompt", max_seq_len, f"The prompt has {num_ids(prompt.ids)} tokens."))


class EchoBuilder(CompletionBuilder):
    """Builds responses in which each choice begins with its prompt. ``silent``: the output is not shown."""

    def __init__(self, prompts: Sequence[EchoedPrompt], silent: bool, **options: Any):
        super().__init__(**options)
        self._prompts, self._silent = prompts, silent

    def full(self, choices: Sequence[Choice]) -> dict[str, Any]:
        choices = [self._shown(choice) for choice in choices]
        response = super().full(choices)
        for choice, body in zip(choices, response["choices"], strict=True):
            prompt = self._prompts[choice.index // self.n]
            body["text"] = prompt.text + body["text"]
            if self.logprobs:  # the first choice of a prompt reports those of the prompt for all
                scores = full_choice(choices[choice.index - choice.index % self.n]).prompt_logprobs
                _prepend(body["logprobs"], prompt.tokens, scores)
        return response

    def first_chunk(self, index: int) -> dict[str, Any] | None:
        text = self._prompts[index // self.n].text
        fields = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
        return self._chunk({**fields, "token_ids": []} if self.token_ids else fields)

    def chunk(self, choice: Choice) -> dict[str, Any]:
        return super().chunk(self._shown(choice))

    def usage(self, ends: Sequence[Finished | None]) -> dict[str, Any]:
        return super().usage([end and self._end(end) for end in ends])

    def _shown(self, choice: Choice) -> Choice:
        """Return a choice without its output, if that is not shown."""
        if not self._silent:
            return choice
        end = choice.finish and self._end(choice.finish)
        return FullChoice(choice.index, finish=end, prompt_logprobs=full_choice(choice).prompt_logprobs)

    def _end(self, end: Finished) -> Finished:
        return msgspec.structs.replace(end, finish_reason="length", output_tokens=0) if self._silent else end


def _prepend(logprobs: dict[str, Any], tokens: Sequence[str], scores: Sequence[Any]) -> None:
    """Put the prompt's tokens before those of the output. The first one has no log-probability.

    ``scores`` are those of `Choice`: for each position, the prompt's own token and then the most likely ones.
    """
    offsets, offset = [], 0
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    named: list[str] = [*tokens[:1]]
    values: list[float | None] = []
    top: list[dict[str, float] | None] = []
    for position in scores:
        if position is None:
            values.append(None)
            top.append(None)
            continue
        named.append(name_of(position[0]))
        values.append(max(position[0].logprob, MIN_LOGPROB))
        top.append({name_of(each): max(each.logprob, MIN_LOGPROB) for each in reversed(position)})
    logprobs["tokens"] = [*named, *logprobs["tokens"]]
    logprobs["token_logprobs"] = [*values, *logprobs["token_logprobs"]]
    logprobs["top_logprobs"] = [*top, *logprobs["top_logprobs"]]
    logprobs["text_offset"] = [*offsets, *(offset + each for each in logprobs["text_offset"])]

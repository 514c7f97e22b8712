"""``LLM``: the whole engine in one Python object, without a server.

Rank 0's scheduler runs in the caller's process, and so does text in and out. Knows the parts that a server spreads
over processes, and how to drive them for a list of prompts at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from types import TracebackType
from typing import Any

import msgspec
from tqdm import tqdm

from minisgl.core import EngineDeadError, FinishReason, InvalidRequestError, Logprobs, Output, SamplingParams
from minisgl.engine.followers import start_engine
from minisgl.models.resolve import resolve_model
from minisgl.options.compose import compose
from minisgl.plugin_manager.manager import PluginManager
from minisgl.scheduler.build import build_scheduler
from minisgl.tokenizer.detokenizer import Detokenizer
from minisgl.tokenizer.tokenizer import Tokenizer

__all__ = ["LLM", "Choice", "RequestOutput"]

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


@dataclass
class Choice:
    """One continuation of a prompt. ``token_ids`` includes the token that ended it, ``text`` does not."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    logprobs: list[Logprobs] | None = None
    """One for each of ``token_ids``, where the sampling parameters ask for them."""


@dataclass
class RequestOutput:
    """What became of one prompt; ``choices`` are its ``n`` continuations, and the other names are the first one's."""

    prompt_token_ids: list[int]
    choices: list[Choice]
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache spared the first choice."""

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> list[Logprobs] | None:
        return self.choices[0].logprobs


class LLM:
    """A model ready to generate.

    ``model`` and ``overrides`` are options as on the command line (``overrides=["cache=naive", "tp=2"]``). Use it as
    a context manager, or call `close`. Raises `ConfigError` where the options are wrong. One ``generate`` runs at a
    time; calls from other threads wait.
    """

    def __init__(self, model: str = "tutor", *, overrides: Sequence[str] = ()):
        self.plugin_manager = PluginManager.load()
        self.config = compose(self.plugin_manager, [f"model={model}", *overrides])
        self.tokenizer = Tokenizer.from_dir(resolve_model(self.config.model))
        self.engine = start_engine(self.config, self.plugin_manager)
        self.scheduler = build_scheduler(self.config, self.plugin_manager, self.engine)
        self._lock = threading.Lock()
        self._next_uid = 0
        self._closed = False

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give back the model's memory and end the other ranks. Closing twice is allowed."""
        with self._lock:
            if not self._closed:
                self._closed = True
                try:
                    self.plugin_manager.close()
                finally:
                    self.engine.close()

    # ---- asking ---------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt: a text, or its token ids; one of them, or a list of both kinds.

        ``params`` is for all prompts, or one for each. ``progress`` shows a bar; None: on a terminal, when it takes
        more than a second. Outputs are in the order of the prompts. Raises `InvalidRequestError` for a prompt or a
        parameter that
        can't be served, before anything is computed, and `EngineDeadError` where a device or a rank fails.
        """
        one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral))
        each: Any = [prompts] if one else prompts
        ids = [self._encode(i, prompt) for i, prompt in enumerate(each)]
        return self._run(ids, self._params(params, len(ids)), progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of a list of them: messages with ``role`` and ``content``, put into the
        model's chat template. Otherwise as `generate`."""
        chats: Any = [messages] if len(messages) > 0 and isinstance(messages[0], Mapping) else messages
        if self.tokenizer is None:
            raise InvalidRequestError("messages", f"{self.config.model} has no tokenizer, so it can't chat.")
        ids = [self.tokenizer.chat(chat) for chat in chats]
        return self._run(ids, self._params(params, len(ids)), progress)

    def _encode(self, index: int, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return [int(token) for token in prompt]
        if self.tokenizer is None:
            raise InvalidRequestError(
                "prompt", f"{self.config.model} has no tokenizer: give prompt {index} as token ids."
            )
        return self.tokenizer.encode(prompt)

    def _params(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * count
        elif len(params) != count:
            raise ValueError(f"{len(params)} SamplingParams were given for {count} prompts: give one, or one for each.")
        else:
            each = list(params)
        for p in each:
            p.check(self.engine.spec.vocab_size)
        if self.tokenizer is None and any(p.stop for p in each):
            raise InvalidRequestError("stop", f"{self.config.model} has no tokenizer, so stop strings can't be found.")
        return each

    # ---- running --------------------------------------------------------------------------------

    def _run(
        self, prompts: list[list[int]], params: list[SamplingParams], progress: bool | None
    ) -> list[RequestOutput]:
        with self._lock:
            if self._closed:
                raise RuntimeError("this LLM was closed; make another one")
            batch = _Batch(Detokenizer(self.tokenizer), prompts, params)
            try:
                self._add(batch)
                with _bar(batch, progress) as bar:
                    while batch.open:
                        out = self.scheduler.step()
                        for uid in batch.take(out):
                            self.scheduler.abort_request(uid)
                        bar.update(batch.finished - bar.n)
                self._drain()
            except EngineDeadError as error:
                self.scheduler.fail(str(error))
                raise
            except BaseException:
                self._abandon(batch)
                raise
            return batch.outputs

    def _add(self, batch: _Batch) -> None:
        for i, (ids, p) in enumerate(zip(batch.prompts, batch.params, strict=True)):
            for k in range(p.n):
                uid, self._next_uid = self._next_uid, self._next_uid + 1
                # Several choices of one seed differ, and are the same next time.
                seed = None if p.seed is None else (p.seed + k + 2**63) % 2**64 - 2**63
                try:
                    self.scheduler.add_request(uid, ids, _replace(p, seed))
                except InvalidRequestError as error:
                    where = f"prompt {i}: " if len(batch.prompts) > 1 else ""
                    raise InvalidRequestError(error.field, where + error.message, error.code) from None
                batch.expect(uid, i, k)

    def _abandon(self, batch: _Batch) -> None:
        """Leave the scheduler as it was before the batch came."""
        for uid in batch.open:
            self.scheduler.abort_request(uid)
        self._drain()

    def _drain(self) -> None:
        """Read the step that was in flight when the last request ended."""
        while self.scheduler.has_work:
            self.scheduler.step()


class _Batch:
    """The prompts of one call, and what has become of them."""

    def __init__(self, detokenizer: Detokenizer, prompts: list[list[int]], params: list[SamplingParams]):
        self.prompts, self.params, self._detokenizer = prompts, params, detokenizer
        self.outputs = [
            RequestOutput(ids, [Choice(logprobs=None if p.logprobs is None else []) for _ in range(p.n)])
            for ids, p in zip(prompts, params, strict=True)
        ]
        self.open: dict[int, tuple[int, int]] = {}  # uid -> (prompt, choice)
        self.finished = 0
        self.tokens = 0

    def expect(self, uid: int, prompt: int, choice: int) -> None:
        self.open[uid] = (prompt, choice)
        self._detokenizer.open(uid, self.prompts[prompt], self.params[prompt])

    def take(self, out: Output) -> list[int]:
        """Book what a step brought; returns the uids that met a stop string, for the scheduler to abort."""
        self.tokens += len(out.uids)
        for index, entry in out.logprobs.items():
            prompt, k = self.open[out.uids[index]]
            found = self.outputs[prompt].choices[k].logprobs
            assert found is not None
            found.append(Logprobs(*entry))
        stopped = []
        for delta in self._detokenizer.feed(out):
            prompt, k = self.open[delta.uid]
            output, choice = self.outputs[prompt], self.outputs[prompt].choices[k]
            choice.text += delta.text
            choice.token_ids += delta.tokens
            end = delta.finish
            if end is None:
                if delta.stopped is not None:
                    stopped.append(delta.uid)
                continue
            if choice.logprobs is not None:  # those of tokens that came after a stop string
                del choice.logprobs[len(choice.token_ids) :]
            choice.finish_reason = end.finish_reason
            if k == 0:
                output.cached_tokens = end.cached_tokens
            del self.open[delta.uid]
            self.finished += 1
        return stopped


def _replace(params: SamplingParams, seed: int | None) -> SamplingParams:
    """One choice's parameters."""
    return msgspec.structs.replace(params, seed=seed, n=1)


def _bar(batch: _Batch, progress: bool | None) -> Any:
    """A progress bar over choices, in the unit that the caller counts in."""
    return tqdm(
        total=len(batch.open),
        desc="Generating",
        unit="request",
        dynamic_ncols=True,
        delay=0.0 if progress else 1.0,
        disable=None if progress is None else not progress,  # None: only on a terminal
    )

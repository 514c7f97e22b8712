"""``LLM``: the whole engine in one Python object, without a server.

The scheduler of rank 0 runs in the caller's process, and so do the tokenizer and the detokenizer. `LLM.generate` and
`LLM.chat` answer a list of prompts. `LLM.add_request` and `LLM.step` are the same loop, one turn at a time.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any

import msgspec
from tqdm import tqdm

from minisgl.core import I32, EngineDeadError, InvalidRequestError, SamplingParams
from minisgl.engine.build import start_engine
from minisgl.models.generation_config import default_sampling_params, with_defaults
from minisgl.models.resolve import resolve_model, warn_of_same_name
from minisgl.options.compose import compose
from minisgl.outputs import Choice, Outputs, RequestOutput
from minisgl.plugin_manager.discovery import exists, import_module
from minisgl.plugin_manager.manager import BUILT_IN, PluginManager
from minisgl.scheduler.build import build_scheduler
from minisgl.tokenizer.detokenizer import Detokenizer, check_stops
from minisgl.tokenizer.tokenizer import build_grammars, build_tokenizer

__all__ = ["LLM", "Choice", "RequestOutput"]

log = logging.getLogger(__name__)

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class LLM:
    """A model ready to generate.

    ``model`` and ``overrides`` are options as on the command line (``overrides=["cache=naive", "tp=2"]``). Use it as
    a context manager, or call `close`. Raise `ConfigError` if the options are wrong. Methods may be called from several
    threads: one `generate`, `chat` or `step` runs at a time, and the other threads wait.

    If an error breaks a call off, the LLM is closed: every later call raises a RuntimeError that says so. The error is
    an `EngineDeadError` if the engine failed. A refused request closes nothing. Ctrl-C (SIGINT) is such an error too,
    except with the class that ``from minisgl import LLM`` imports, `plugins/command/interrupts/llm.py`: its calls can
    be interrupted between two turns of the scheduler.
    """

    def __init__(self, model: str = "tutor", *, overrides: Sequence[str] = ()):
        self.plugin_manager = PluginManager.load()
        self.config = compose(self.plugin_manager, [f"model={model}", *overrides])
        path = resolve_model(self.config.model)
        warn_of_same_name(self.config.model)
        self.tokenizer = build_tokenizer(
            self.config.tokenizer, self.plugin_manager, path, self.config.parse_special_tokens
        )
        self._grammars = build_grammars(lambda: self.config.grammar, self.plugin_manager, self.tokenizer)
        defaults = default_sampling_params(self.config, path)
        self._default_params = with_defaults(defaults)
        self._outputs = Outputs(Detokenizer(self.tokenizer))
        self._changed: dict[int, RequestOutput] = {}  # what the next `step` returns
        self._lock = threading.RLock()
        self._next_uid = 0
        self._next_request_id = 0
        self._closed: tuple[type[RuntimeError], str] | None = None  # the error that every call raises
        self._released = False
        self.engine = start_engine(self.config, self.plugin_manager)
        try:
            self.scheduler = build_scheduler(
                self.config, self.plugin_manager, self.engine, tokenizer=self.tokenizer, grammars=self._grammars
            )
        except BaseException:
            self.engine.close()
            raise

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the model's memory and end the processes of the other ranks. Closing twice is allowed."""
        with self._lock:
            if self._closed is None:
                self._closed = RuntimeError, "this LLM was closed; make another one"
            self._release()

    def _release(self) -> None:
        if self._released:
            return
        try:
            self.scheduler.close()
        finally:
            try:
                self.plugin_manager.close()
            finally:
                self.engine.close()
                self._released = True

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters of a call without any.

        As in vLLM, the model's generation_config.json sets temperature, top_k, top_p, min_p, repetition_penalty and
        max_tokens. Everything else, and everything with ``generation_config=none``, is as in ``SamplingParams()``.

        A `SamplingParams` object that you give is used as it is. To change single values of the model, change this
        result: ``msgspec.structs.replace(llm.get_default_sampling_params(), max_tokens=100)``.
        """
        return self._default_params

    # ---- all prompts at once ------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt and return the outputs in the order of the prompts.

        A prompt is a text or a list of token ids; ``prompts`` is one prompt, or a list that may mix both kinds.
        ``params`` is one object for all prompts, or a list, one for each. Without it, the parameters are those of
        `get_default_sampling_params`. ``progress`` shows a bar; None shows a bar on a terminal, if the call takes more
        than a second. Raise `InvalidRequestError` for a prompt or a parameter that can't be served, before anything is
        computed, and `EngineDeadError` if a device or a rank fails.
        """
        self._check_open()
        one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral))
        each: Any = [prompts] if one else prompts
        ids = [self._encode(prompt, f"prompt {i}") for i, prompt in enumerate(each)]
        return self._run(ids, self._params(params, len(ids)), progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of a list of conversations.

        A conversation is a list of messages with ``role`` and ``content``; the model's chat template turns it into a
        prompt. Special tokens in the messages are text, unless the option ``parse_special_tokens`` is true. Everything
        else is as in `generate`.
        """
        self._check_open()
        chats: Any = [messages] if len(messages) > 0 and isinstance(messages[0], Mapping) else messages
        if self.tokenizer is None:
            raise InvalidRequestError("messages", f"{self.config.model} has no tokenizer, so it can't chat.")
        ids = [self.tokenizer.chat(chat) for chat in chats]
        return self._run(ids, self._params(params, len(ids)), progress)

    # ---- one turn at a time -------------------------------------------------------------------------

    def add_request(self, prompt: Prompt, params: SamplingParams | None = None) -> int:
        """Queue one prompt, a text or a list of token ids, and return its request id.

        Nothing is computed before `step` is called. Raise `InvalidRequestError` for a prompt or a parameter that can't
        be served.
        """
        self._check_open()
        ids, each = [self._encode(prompt, "the prompt")], self._params(params, 1)
        outputs: list[RequestOutput] = []
        with self._call(outputs):
            self._add(ids, each, outputs)
        return outputs[0].request_id

    def step(self) -> list[RequestOutput]:
        """Run one turn of the scheduler and return the output of each request that gained tokens or ended.

        A request's output is the same object each time, and grows; `RequestOutput.finished` says that it is complete.
        With ``overlap=true`` the tokens of a step arrive one turn later, so the first turn returns an empty list. Raise
        `EngineDeadError` if a device or a rank fails.
        """
        with self._lock:
            with self._call():
                self._turn()
            changed, self._changed = list(self._changed.values()), {}
            return changed

    def abort_request(self, request_id: int) -> None:
        """End a request early. The next `step` returns its output so far, with the finish reason ``abort``.

        A request id that is unknown, or whose request has ended, is ignored.
        """
        with self._call():
            self._abort(self._outputs.uids_of(request_id))

    def has_unfinished_requests(self) -> bool:
        """Return whether `step` has outputs left to deliver."""
        with self._lock:
            self._check_open()
            return bool(self._outputs.open or self._changed)

    # ---- checking -----------------------------------------------------------------------------------

    def _check_open(self) -> None:
        """Raise RuntimeError if this LLM was closed."""
        if self._closed is not None:
            kind, message = self._closed
            raise kind(message)

    def _encode(self, prompt: Prompt, what: str) -> list[int]:
        if not isinstance(prompt, str):
            return [int(token) for token in prompt]
        if self.tokenizer is None:
            raise InvalidRequestError("prompt", f"{self.config.model} has no tokenizer: give {what} as token ids.")
        return self.tokenizer.encode(prompt)

    def _params(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            each = [params or self._default_params] * count
        elif len(params) != count:
            raise ValueError(f"{len(params)} SamplingParams were given for {count} prompts: give one, or one for each.")
        else:
            each = list(params)
        for p in each:
            p.check(self.engine.spec.vocab_size)
            check_stops(p, self.tokenizer)
            if p.grammar is not None and self._grammars is not None:
                self._grammars.check(p.grammar)
        return each

    # ---- running ------------------------------------------------------------------------------------

    def _run(self, prompts: list[list[int]], params: list[SamplingParams], bar: bool | None) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        with self._call(outputs):
            self._add(prompts, params, outputs)
            self._finish(outputs, bar)
            for output in outputs:  # these outputs belong to the caller of `generate`, not to the next `step`
                self._changed.pop(output.request_id, None)
        return outputs

    def _finish(self, outputs: list[RequestOutput], progress: bool | None) -> None:
        """Run turns until each of these outputs is finished."""
        ended = {output.request_id: 0 for output in outputs}  # request id → choices that have ended
        unfinished = set(ended)
        with _bar(sum(len(output.choices) for output in outputs), progress) as bar:
            while unfinished:
                for output in self._turn():
                    if output.request_id in unfinished:
                        now = sum(choice.finish_reason is not None for choice in output.choices)
                        bar.update(now - ended[output.request_id])
                        ended[output.request_id] = now
                        if output.finished:
                            unfinished.remove(output.request_id)

    def _add(self, prompts: list[list[int]], params: list[SamplingParams], outputs: list[RequestOutput]) -> None:
        """Queue every choice of every prompt, and append the output of each prompt to ``outputs``.

        If a choice is refused, the caller cancels ``outputs``.
        """
        for i, (ids, p) in enumerate(zip(prompts, params, strict=True)):
            output = RequestOutput(ids, [Choice(logprobs=None if p.logprobs is None else []) for _ in range(p.n)])
            if p.prompt_logprobs is not None:
                output.prompt_logprobs = [None] * min(max(p.logprob_start_len, 1), len(ids))
            output.request_id, self._next_request_id = self._next_request_id, self._next_request_id + 1
            outputs.append(output)
            prompt_ids: Sequence[int] | I32 = ids
            for k in range(p.n):
                try:
                    prompt_ids = self._add_choice(output, k, prompt_ids, p.of_choice(k))
                except InvalidRequestError as error:
                    name = f"prompt {i}: " if len(prompts) > 1 else ""
                    raise InvalidRequestError(error.field, name + error.message, error.code) from None

    def _add_choice(self, output: RequestOutput, k: int, ids: Sequence[int] | I32, params: SamplingParams) -> I32:
        """Queue one choice. Return the scheduler's copy of the prompt, which the next choices share."""
        params = msgspec.structs.replace(params, n=1)
        uid, self._next_uid = self._next_uid, self._next_uid + 1
        self.scheduler.add_request(uid, ids, params)
        self._outputs.expect(uid, output, k, params)
        return self.scheduler.requests[uid].prompt_ids

    def _turn(self) -> list[RequestOutput]:
        """Run one turn of the scheduler, and abort the requests that met a stop string. Return the changed outputs."""
        out = self.scheduler.step()
        changed, stopped = self._outputs.book(out)
        self._changed.update((output.request_id, output) for output in changed)
        self._abort(stopped)
        # The last request has ended: process the result of the step that was in flight then.
        while not self._outputs.open and self.scheduler.has_work:
            self.scheduler.step()
        return changed

    def _abort(self, uids: Sequence[int]) -> None:
        """Abort these choices. The next turn ends them."""
        for uid in uids:
            self.scheduler.abort_request(uid)

    @contextlib.contextmanager
    def _call(self, outputs: Sequence[RequestOutput] = ()) -> Iterator[None]:
        """Let one call at a time change the scheduler.

        If a request is refused, the other ``outputs`` are cancelled. Any other exception closes this LLM, because it
        may have broken off a change.
        """
        with self._lock:
            self._check_open()
            try:
                try:
                    yield
                except InvalidRequestError:
                    self._cancel(outputs)
                    raise
            except InvalidRequestError:  # refused before anything changed, so this LLM stays open
                raise
            except BaseException as error:
                self._close_after(error)
                raise

    def _cancel(self, outputs: Sequence[RequestOutput]) -> None:
        """Abort what is left of these requests, and drop their outputs: `step` does not return them."""
        request_ids = {output.request_id for output in outputs}
        uids = [uid for request_id in request_ids for uid in self._outputs.uids_of(request_id)]
        self._abort(uids)
        while any(uid in self._outputs.open for uid in uids):
            self._turn()
        for request_id in request_ids:
            self._changed.pop(request_id, None)

    def _close_after(self, error: BaseException) -> None:
        """Close this LLM, because ``error`` broke off a call that was changing its state."""
        if self._closed is None:
            cause = ": ".join(filter(None, (type(error).__name__, str(error))))
            kind = EngineDeadError if isinstance(error, EngineDeadError) else RuntimeError
            self._closed = kind, f"this LLM was closed after {cause}; make another one"
        self._outputs = Outputs(Detokenizer(self.tokenizer))
        self._changed.clear()
        if isinstance(error, Exception):  # unlike KeyboardInterrupt, it leaves the requests in order
            try:
                self.scheduler.fail(str(error))  # observers see each open request end
            except Exception:
                log.warning("the open requests could not be ended", exc_info=True)
        try:
            self._release()
        except Exception:
            log.warning("the engine could not be closed", exc_info=True)


def llm_class() -> type[LLM]:
    """Return the class that ``from minisgl import LLM`` imports: `LLM`, with care for Ctrl-C if there is its plugin."""
    name = f"{BUILT_IN}.command.interrupts.llm"
    found: type[LLM] = import_module(name, name).InterruptibleLLM if exists(name) else LLM
    return found


def _bar(total: int, progress: bool | None) -> Any:
    """Return a progress bar over choices."""
    return tqdm(
        total=total,
        desc="Generating",
        unit="request",
        dynamic_ncols=True,
        delay=0.0 if progress else 1.0,
        disable=None if progress is None else not progress,  # None: only on a terminal
    )

"""What the tokenizer processes and the detokenizer's process do: text to tokens and back, between client and scheduler.

One class handles the messages of both, so that one process can be both (``server.tokenizers=0``). Knows the tokenizer
and no engine; imports neither torch nor transformers.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable

import msgspec
import zmq

from minisgl.core import Finished, InvalidRequestError, SamplingParams
from minisgl.message import (
    Abort,
    Addresses,
    ChatPrompt,
    Count,
    Delta,
    DetokenizeRequest,
    IdsPrompt,
    Limits,
    Message,
    Outputs,
    Prompt,
    Pull,
    Push,
    Replies,
    Schedule,
    Stop,
    Submit,
    TextPrompt,
    TextReply,
    TokensReply,
    pack_ids,
    unpack_ids,
)
from minisgl.server.child import Ready, Report
from minisgl.server.errors import refusal
from minisgl.server.heartbeat import Heartbeat
from minisgl.tokenizer.detokenizer import Detokenizer
from minisgl.tokenizer.tokenizer import Tokenizer


def run_text(report: Report, addresses: Addresses, inbox: str, model: str, heartbeat: Heartbeat) -> None:
    """The body of a tokenizer's or the detokenizer's process, which pulls from ``inbox``."""
    tokenizer = Tokenizer.from_dir(model)
    context = zmq.Context()
    pull = Pull(context, inbox)
    worker = TextWorker(tokenizer, Push(context, addresses.api).send, Push(context, addresses.scheduler).send)
    report.send(Ready())
    going = True
    while going:
        heartbeat.rest()
        message = pull.receive()
        heartbeat.beat()
        going = worker.handle(message)
    heartbeat.rest()
    context.destroy(linger=0)


class TextWorker:
    """Answers messages. ``to_api`` and ``to_scheduler`` send one each."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        to_api: Callable[[Message], None],
        to_scheduler: Callable[[Message], None],
    ):
        self._tokenizer, self._to_api, self._to_scheduler = tokenizer, to_api, to_scheduler
        self._detokenizer = Detokenizer(tokenizer)
        self._limits = Limits(0, 0)

    def handle(self, message: Message) -> bool:
        """Do what one message asks for. False where it asks to stop."""
        match message:
            case Outputs():
                self._outputs(message)
            case Submit():
                self._submit(message)
            case Abort():
                self._to_scheduler(message)
            case Count(uid=uid):
                self._answer(lambda: self._count(message), lambda end: TokensReply(uid, error=end), uid)
            case DetokenizeRequest(uid=uid):
                self._answer(lambda: self._untokenize(message), lambda end: TextReply(uid, error=end), uid)
            case Limits():
                self._limits = message
            case Stop():
                return False
            case _:
                raise TypeError(f"a text process got a {type(message).__name__}")
        return True

    # ---- tokens to text ------------------------------------------------------------------------------

    def _outputs(self, message: Outputs) -> None:
        for opened in message.opened:
            self._detokenizer.open(opened.uid, opened.tail, opened.params)
        deltas = self._detokenizer.feed(message.output)
        if deltas:
            self._to_api(Replies(deltas))
        stopped = [delta.uid for delta in deltas if delta.stopped is not None and delta.finish is None]
        if stopped:
            self._to_scheduler(Abort(stopped))

    def _untokenize(self, message: DetokenizeRequest) -> Message:
        if self._tokenizer is None:
            raise InvalidRequestError("tokens", "This model has no tokenizer.")
        ids = unpack_ids(message.ids).tolist()
        for token in ids:
            if token >= self._limits.vocab_size:
                raise InvalidRequestError(
                    "tokens", f"Token id {token} is not in the vocabulary of {self._limits.vocab_size}."
                )
        return TextReply(message.uid, self._tokenizer.decode(ids, skip_special_tokens=False))

    # ---- text to tokens ------------------------------------------------------------------------------

    def _submit(self, message: Submit) -> None:
        def failed(end: Finished) -> Message:
            return Replies([Delta(uid, finish=msgspec.structs.replace(end, uid=uid)) for uid in message.uids])

        self._answer(lambda: self._schedule(message), failed, message.uids[0])

    def _schedule(self, message: Submit) -> None:
        params = message.params
        if self._tokenizer is None and params.stop:
            raise InvalidRequestError(
                "stop", "This model has no tokenizer, so it can't stop at strings: use stop_token_ids."
            )
        ids = self._ids(message.prompt)
        if message.max_tokens_from_context:
            left = self._limits.max_len - len(ids) // 4
            if left < 1:
                raise InvalidRequestError(
                    "prompt",
                    f"The prompt has {len(ids) // 4} tokens; with one more they are over the {self._limits.max_len} "
                    "that this server can hold.",
                    "context_length_exceeded",
                )
            params = msgspec.structs.replace(params, max_tokens=left)
        for i, uid in enumerate(message.uids):
            self._to_scheduler(Schedule(uid, ids, _choice(params, i)))

    def _count(self, message: Count) -> Message:
        ids = self._ids(message.prompt, empty=True)
        strings = None
        if message.strings and self._tokenizer is not None:
            strings = [self._tokenizer.token_text(token) for token in unpack_ids(ids).tolist()]
        return TokensReply(message.uid, ids, strings)

    def _ids(self, prompt: Prompt, empty: bool = False) -> bytes:
        """Return the prompt's token ids, packed. Raise `InvalidRequestError`, unless ``empty`` for an empty prompt."""
        match prompt:
            case IdsPrompt(ids=ids):
                pass
            case TextPrompt(text=text, special=special):
                if self._tokenizer is None:
                    raise InvalidRequestError("prompt", "This model has no tokenizer: give the prompt as token ids.")
                ids = self._encode(self._tokenizer, text, special) if text or empty else b""
            case ChatPrompt(turns=turns, generate=generate, extra=extra):
                if self._tokenizer is None:
                    raise InvalidRequestError("messages", "This model has no tokenizer, so it can't chat.")
                ids = self._encode(self._tokenizer, self._tokenizer.render(turns, generate, extra), False)
        if not ids and not empty:
            raise InvalidRequestError("prompt", "The prompt is empty: it must have at least one token.")
        return ids

    def _encode(self, tokenizer: Tokenizer, text: str, special: bool) -> bytes:
        """A text's token ids, packed. One that can't fit is refused unread: it would hold up all others."""
        if len(text) > tokenizer.longest * self._limits.max_len:
            raise InvalidRequestError(
                "prompt",
                f"The prompt has {len(text)} characters, which are over the {self._limits.max_len} tokens that this "
                "server can hold, however they are cut.",
                "context_length_exceeded",
            )
        return pack_ids(tokenizer.encode(text, special))

    def _answer(self, work: Callable[[], Message | None], failed: Callable[[Finished], Message], uid: int) -> None:
        """Send what ``work`` returns, or what its failure comes to: one bad request never harms another."""
        try:
            reply = work()
        except InvalidRequestError as refused:
            reply = failed(refusal(uid, refused))
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            reply = failed(Finished(uid, "error", error=f"The tokenizer failed: {type(error).__name__}: {error}"))
        if reply is not None:
            self._to_api(reply)


def _choice(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of one of ``n`` choices: with a seed given, each choice has the next one."""
    if params.seed is None or index == 0:
        return params
    seed = params.seed + index
    return msgspec.structs.replace(params, seed=seed if seed < 2**63 else seed - 2**64)

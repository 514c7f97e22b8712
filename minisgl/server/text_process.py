"""The tokenizer processes and the detokenizer process: text to tokens and back, between API server and scheduler.

One class handles the messages of both, so that one process can do both jobs (``server.tokenizers=0``). This module
knows the tokenizer but no engine, and imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from minisgl.config import ConfigError
from minisgl.core import InvalidRequestError
from minisgl.message import (
    Abort,
    Call,
    ChatPrompt,
    Delta,
    Limits,
    Message,
    Outputs,
    Prompt,
    Replies,
    Schedule,
    Stop,
    Submit,
    TextPrompt,
    TokensPrompt,
    num_ids,
    pack_ids,
)
from minisgl.message.link import attempt
from minisgl.message.queue import Addresses, Pull, Push
from minisgl.plugin_manager.discovery import exists, import_module
from minisgl.plugin_manager.encoding import decode_part, options_of, plugins_of
from minisgl.plugin_manager.manager import PluginManager
from minisgl.sampling_params import too_long
from minisgl.server.worker_pool import Ready, Report
from minisgl.tokenizer.detokenizer import Detokenizer, check_stops
from minisgl.tokenizer.tokenizer import Tokenizer, build_grammars, build_tokenizer

LOGPROBS = "minisgl.plugins.http.apis.logprobs"
"""The plugin that adds the log-probabilities of tokens to a detokenizer's deltas."""
WARM_UP = "minisgl.plugins.tokenizer.warm_up"
"""The plugin that does before the first request what is done once."""
FAIR = "minisgl.plugins.http.apis.fair_inbox"
"""The plugin with the inbox in which a request with a thousand prompts does not delay all other messages."""


def run_text_process(report: Report, addresses: Addresses, encoded: bytes, inbox: str, model: str) -> None:
    """Run a tokenizer process or the detokenizer process until a `Stop` message arrives.

    This is the ``body`` argument of `worker_main`. ``inbox`` is the address at which the process receives messages.
    ``model`` is the model's directory, and ``encoded`` the config, encoded by `encode_config`.
    """
    manager = PluginManager.load(light=True)

    def options_of_part(group: str) -> Any:
        try:
            return decode_part(encoded, manager, group)
        except ConfigError:  # no built-in part has this name: a plugin of the user registers it
            for word in plugins_of(encoded):
                manager.add(word)
            return decode_part(encoded, manager, group)

    (parse_special_tokens,) = options_of(encoded, "parse_special_tokens")
    tokenizer = build_tokenizer(options_of_part("tokenizer"), manager, Path(model), parse_special_tokens)
    grammars = build_grammars(lambda: options_of_part("grammar"), manager, tokenizer)
    if exists(WARM_UP):
        import_module(WARM_UP, WARM_UP).warm_up(tokenizer)
    context = zmq.Context()
    pull = Pull(context, inbox)
    messages: Any = pull
    to_api = Push(context, addresses.api)
    worker = TextWorker(tokenizer, to_api.send, Push(context, addresses.scheduler).send, grammars)
    worker.inbox, worker.manager = pull, manager
    report.send(Ready())
    running = True
    while running:
        message = messages.receive()
        if isinstance(message, Submit) and message.group and messages is pull and exists(FAIR):
            messages = import_module(FAIR, FAIR).FairInbox(pull, message)
        else:
            running = worker.handle(message)
    context.destroy(linger=0)


class TextWorker:
    """The message handler of a tokenizer process or of the detokenizer process.

    ``to_api(message)`` sends a message to the API server, and ``to_scheduler(message)`` sends one to the scheduler.
    ``grammars`` checks the grammars of requests; without it, the scheduler refuses each.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        to_api: Callable[[Message], None],
        to_scheduler: Callable[[Message], None],
        grammars: Any = None,
    ):
        self._grammars = grammars
        self.tokenizer, self.to_api, self._to_scheduler = tokenizer, to_api, to_scheduler
        self._detokenizer = Detokenizer(tokenizer)
        self._logprobs: Any = None  # what adds log-probabilities, from the first request on that asks for some
        self.limits = Limits(0, 0)
        self.inbox: Pull | None = None  # these two are for `Call`
        self.manager: PluginManager | None = None

    def handle(self, message: Message) -> bool:
        """Handle one message. Return False if the message is `Stop`, otherwise True."""
        match message:
            case Outputs():
                self._outputs(message)
            case Submit():
                self._submit(message)
            case Abort():
                self._to_scheduler(message)
            case Call():
                message.run(self)
            case Limits():
                self.limits = message
            case Stop():
                return False
            case _:
                raise TypeError(f"a text process got a {type(message).__name__}")
        return True

    # ---- tokens to text ------------------------------------------------------------------------------

    def _outputs(self, message: Outputs) -> None:
        for req in message.new_requests:
            self._detokenizer.add_request(req.uid, req.prompt_tail, req.params)
            if req.params.asks_for_logprobs:
                self._logprobs = self._logprobs or import_module(LOGPROBS, LOGPROBS).LogprobTexts(self.tokenizer)
                self._logprobs.add_request(req)
        deltas = self._detokenizer.feed(message.output)
        if self._logprobs is not None:
            deltas = self._logprobs.add_to(deltas, message.output)
        if deltas:
            self.to_api(Replies(deltas))
        stopped = [delta.uid for delta in deltas if delta.matched_stop is not None and delta.finish is None]
        if stopped:
            self._to_scheduler(Abort(stopped))

    # ---- text to tokens ------------------------------------------------------------------------------

    def _submit(self, message: Submit) -> None:
        end = attempt(lambda: self._schedule(message), message.uids[0], message.request_id)
        if end is not None:
            ends = [msgspec.structs.replace(end, uid=uid) for uid in message.uids]
            self.to_api(Replies([Delta(end.uid, finish=end) for end in ends]))

    def _schedule(self, message: Submit) -> None:
        params = message.params
        check_stops(params, self.tokenizer)
        if params.asks_for_logprobs and not exists(LOGPROBS):
            raise InvalidRequestError("logprobs", f"Log-probabilities need the plugin {LOGPROBS}, which is missing.")
        if params.grammar is not None and self._grammars is not None:
            self._grammars.check(params.grammar)
        ids = self.token_ids(message.prompt)
        if message.max_tokens_from_context:
            left = self.limits.max_seq_len - num_ids(ids)
            if left < 1:
                what = f"The prompt has {num_ids(ids)} tokens, and the answer needs at least one."
                raise too_long("prompt", self.limits.max_seq_len, what)
            params = msgspec.structs.replace(params, max_tokens=min(left, params.max_tokens))
            params.check()  # min_tokens may be more than that
        self._to_scheduler(Schedule(message.uids, ids, params, message.group))

    def token_ids(self, prompt: Prompt, empty: bool = False) -> bytes:
        """Return the prompt's token ids, packed by `pack_ids`.

        Raise `InvalidRequestError` if the prompt can't be tokenized, or if it is empty and ``empty`` is false.
        """
        match prompt:
            case TokensPrompt(ids=ids):
                pass
            case TextPrompt(text=text, add_special_tokens=add_special_tokens):
                if self.tokenizer is None:
                    raise InvalidRequestError("prompt", "This model has no tokenizer: give the prompt as token ids.")
                self.tokenizer.check_length(text, self.limits.max_seq_len)
                ids = pack_ids(self.tokenizer.encode(text, add_special_tokens)) if text or empty else b""
            case ChatPrompt():
                if self.tokenizer is None:
                    raise InvalidRequestError("messages", "This model has no tokenizer, so it can't chat.")
                prompt = with_read_variables(prompt, self.tokenizer)
                self.tokenizer.check_length(prompt, self.limits.max_seq_len)
                chat = self.tokenizer.render_prompt(prompt)
                self.tokenizer.check_length(chat.text, self.limits.max_seq_len)
                ids = pack_ids(self.tokenizer.encode_chat(chat))
        if not isinstance(prompt, TokensPrompt) and prompt.num_kept_tokens:
            ids = ids[-4 * prompt.num_kept_tokens :]  # packed: 4 bytes a token
        if not ids and not empty:
            raise InvalidRequestError("prompt", "The prompt is empty: it must have at least one token.")
        return ids


def with_read_variables(prompt: ChatPrompt, tokenizer: Tokenizer) -> ChatPrompt:
    """Return a chat whose template variables include those of its ``optional_kwargs`` that the template reads."""
    if not prompt.optional_kwargs or tokenizer.template is None:
        return prompt
    read = {k: value for k, value in prompt.optional_kwargs.items() if k in tokenizer.template.variables}
    return msgspec.structs.replace(prompt, chat_template_kwargs={**read, **prompt.chat_template_kwargs})

"""The sampling parameters of a request, and the error of a request that can't be served."""

from __future__ import annotations

import math
import re
import reprlib
from typing import Any, Literal

import msgspec


class InvalidRequestError(ValueError):
    """A request was rejected before it was queued, because it can never be served (promise 2).

    ``field`` names the invalid request parameter, ``message`` describes the error, ``code`` is OpenAI's error code.
    """

    def __init__(self, field: str, message: str, code: str = "invalid_value"):
        super().__init__(message)
        self.field, self.message, self.code = field, message, code

    def __reduce__(self) -> tuple[Any, ...]:
        return InvalidRequestError, (self.field, self.message, self.code)


def too_long(field: str, limit: int, what: str) -> InvalidRequestError:
    """Return the error of a request that is longer than the ``limit`` tokens of the context. ``what`` says its length.

    The message begins with OpenAI's words, by which clients such as litellm recognise this error.
    """
    return InvalidRequestError(
        field, f"This model's maximum context length is {limit} tokens. {what}", "context_length_exceeded"
    )


class Grammar(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a text may be, for `SamplingParams.grammar`.

    ``kind`` says what ``text`` is: a JSON schema, a regular expression that matches the whole answer, a JSON list of
    strings of which the answer is one, a grammar in the form of Lark, or a *frame*: literal texts around JSON schemas,
    as the JSON that `minisgl.plugins.grammar.frame` describes. ``field`` is the client's name of the parameter, for
    error messages.

    The grammar is that of the text after the first token ``after``, such as ``</think>``, if that is not empty. With
    ``opener``, the text before it is only allowed if the answer begins with the token ``opener``. ``prefix`` is text
    before the answer that belongs to the grammar's text: the answer continues it.
    """

    kind: Literal["json_schema", "regex", "choice", "lark", "frame"]
    text: str
    field: str = "grammar"
    after: str = ""
    opener: str = ""
    prefix: str = ""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling and stopping parameters of one request. Immutable. The field names are OpenAI's and vLLM's.

    - ``temperature``: 0 selects greedy sampling.
    - ``top_k``: 0 or -1 turns top-k off.
    - ``seed``: with a seed, the sampled tokens do not depend on the other requests in the batch. With None, the
      scheduler derives a seed from the server's seed.
    - ``stop``: strings that end the request, at most 16 of at most 1,024 characters each. A stop string is not part of
      the returned text.
    - ``include_stop_str_in_output``: the text has the stop string, or the text of the stop token, that ended it.
    - ``min_tokens``: the answer has at least this many tokens before the one that ends it, such as an end-of-sequence
      token. Stop strings in the text before are no stop strings. A grammar that can only end, ends before.
    - ``bad_words``: words that the answer must not have, at most 64 of at most 64 characters each. As in vLLM, the
      tokens of a word are forbidden, with and without a space before them; other tokens may have the same text.
    - ``allowed_token_ids``: the only tokens that the answer may have, an end-of-sequence token included; at most
      16,384.
    - ``stop_token_ids``: token ids that end the request, like an end-of-sequence id; at most 1,024.
    - ``logprobs``: number of alternatives reported with each output token. 0 reports the sampled token's
      log-probability only; None reports no log-probabilities.
    - ``prompt_logprobs``: the same for the tokens of the prompt, from position ``logprob_start_len`` on (SGLang's
      name). The first token of a prompt has no log-probability.
    - ``cache_salt``: requests share cached KV only with requests that have the same salt. In vLLM's API it is a field
      of the request, too.
    - ``grammar``: the texts that the answer may be. It ends where the grammar says so, so ``ignore_eos`` is refused.
    - ``priority``: lower is more urgent, a 32-bit integer. A value other than 0 needs a scheduling policy that uses
      priorities, as in vLLM.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_start_len: int = 0
    skip_special_tokens: bool = True
    cache_salt: str | None = None
    priority: int = 0
    grammar: Grammar | None = None
    min_tokens: int = 0
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    include_stop_str_in_output: bool = False

    MAX_LOGPROBS = 20
    MAX_STOPS = 16
    MAX_STOP_CHARS = 1024
    MAX_STOP_TOKEN_IDS = 1024
    MAX_BIAS = 1024
    MAX_ALLOWED = 16384
    MAX_BAD_WORDS = 64
    MAX_BAD_WORD_CHARS = 64
    MAX_SALT = 256
    MAX_GRAMMAR = 1 << 16

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is chosen at every position (``temperature`` is 0)."""
        return self.temperature == 0.0

    @property
    def needs_history(self) -> bool:
        """Whether sampling depends on the request's earlier tokens, because a penalty is on."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def of_choice(self, index: int) -> SamplingParams:
        """Return the parameters of one of a prompt's ``n`` choices: choice ``index`` samples with seed + index.

        The choices have one prompt, so only the first of them reports its log-probabilities.
        """
        if index == 0:
            return self
        seed = None if self.seed is None else (self.seed + index + 2**63) % 2**64 - 2**63
        return msgspec.structs.replace(self, seed=seed, prompt_logprobs=None)

    @property
    def asks_for_logprobs(self) -> bool:
        return self.logprobs is not None or self.prompt_logprobs is not None

    def check(self, vocab_size: int | None = None) -> None:
        """Raise `InvalidRequestError`, which names the field, if a value is out of range or of a wrong type.

        Without ``vocab_size``, a token id must only be an int32. Sizes are checked before values: the cost is bounded
        whatever the fields contain.
        """

        def need(ok: bool, field: str, what: str) -> None:
            if not ok:
                raise InvalidRequestError(field, f"{field} must be {what}, got {_shorten(getattr(self, field))}.")

        for field, most in (
            ("stop_token_ids", self.MAX_STOP_TOKEN_IDS),
            ("logit_bias", self.MAX_BIAS),
            ("allowed_token_ids", self.MAX_ALLOWED),
        ):
            size = len(getattr(self, field)) if hasattr(getattr(self, field), "__len__") else 0
            need(size <= most, field, f"at most {most} token ids")
        for field, most, chars in (
            ("stop", self.MAX_STOPS, self.MAX_STOP_CHARS),
            ("bad_words", self.MAX_BAD_WORDS, self.MAX_BAD_WORD_CHARS),
        ):
            texts = getattr(self, field)
            texts = texts if isinstance(texts, tuple | list) else ()
            need(len(texts) <= most, field, f"at most {most} strings")
            short = all(not isinstance(text, str) or len(text) <= chars for text in texts)
            need(short, field, f"strings of at most {chars} characters")
        try:
            msgspec.convert(msgspec.structs.asdict(self), SamplingParams)
        except msgspec.ValidationError as error:  # "Expected `int`, got `str` - at `$.stop[...]`"
            field = re.sub(r"[`\[].*", "", str(error).rpartition("$.")[2])
            raise InvalidRequestError(field, f"{error}.") from None
        for field in ("max_tokens", "top_k", "logprob_start_len"):
            need(getattr(self, field) < 2**31, field, "below 2^31")
        for field in ("temperature", "top_p", "min_p", "repetition_penalty"):
            need(math.isfinite(getattr(self, field)), field, "a finite number")
        need(self.max_tokens >= 1, "max_tokens", "at least 1")
        need(0 <= self.min_tokens <= self.max_tokens, "min_tokens", f"between 0 and max_tokens, {self.max_tokens}")
        need(0.0 <= self.temperature <= 100.0, "temperature", "between 0 and 100")
        need(self.top_k >= -1, "top_k", "-1 or 0 (off) or at least 1")
        need(0.0 < self.top_p <= 1.0, "top_p", "above 0 and at most 1")
        need(0.0 <= self.min_p <= 1.0, "min_p", "between 0 and 1")
        need(self.seed is None or -(2**63) <= self.seed < 2**63, "seed", "a 64-bit integer")
        need(1 <= self.n <= 128, "n", "between 1 and 128")
        need(self.repetition_penalty > 0.0, "repetition_penalty", "above 0")
        need(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", "between -2 and 2")
        need(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", "between -2 and 2")
        for field in ("logprobs", "prompt_logprobs"):
            count = getattr(self, field)
            need(count is None or 0 <= count <= self.MAX_LOGPROBS, field, f"between 0 and {self.MAX_LOGPROBS}")
        need(self.logprob_start_len >= 0, "logprob_start_len", "at least 0")
        salt_ok = self.cache_salt is None or 0 < len(self.cache_salt) <= self.MAX_SALT
        need(salt_ok, "cache_salt", f"a string of 1 to {self.MAX_SALT} characters")
        need(-(2**31) <= self.priority < 2**31, "priority", "a 32-bit integer")
        need(all(self.stop), "stop", "strings that are not empty")
        need(all(word.strip() for word in self.bad_words), "bad_words", "words that are not empty")
        need(self.allowed_token_ids != (), "allowed_token_ids", "at least one token id")
        if self.grammar is not None:
            if len(self.grammar.text) + len(self.grammar.prefix) > self.MAX_GRAMMAR:
                message = f"{self.grammar.field} must be a grammar of at most {self.MAX_GRAMMAR} characters."
                raise InvalidRequestError(self.grammar.field, message)
            need(not self.ignore_eos, "ignore_eos", "false if the request has a grammar, which says where it ends")
        need(all(-100.0 <= b <= 100.0 for b in self.logit_bias.values()), "logit_bias", "between -100 and 100")
        limit = 2**31 if vocab_size is None else vocab_size
        inside = "token ids below " + ("2^31" if vocab_size is None else f"the vocabulary size {vocab_size}")
        need(all(0 <= t < limit for t in self.stop_token_ids), "stop_token_ids", inside)
        need(all(0 <= t < limit for t in self.logit_bias), "logit_bias", inside)
        need(all(0 <= t < limit for t in self.allowed_token_ids or ()), "allowed_token_ids", inside)


def shorten(text: str, limit: int = 100) -> str:
    """Return ``text`` for an error message: cut to ``limit`` characters, of which the last is then an ellipsis.

    An error repeats at most 200 characters of a request: 100 in its message, and 100 in the name of the parameter.
    """
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _shorten(value: object) -> str:
    """Return ``repr(value)``, cut to a length that fits into an error message."""
    try:
        return reprlib.repr(value)
    except ValueError:  # Python prints no integer of more than 4,300 digits
        return "a value that is too long to print"

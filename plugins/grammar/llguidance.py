"""`grammar=llguidance`: masks by the library llguidance: fast, with most of JSON schema, and with Lark grammars."""

from __future__ import annotations

import functools
import json
import os
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from minisgl.core import I32
from minisgl.hooks import hookimpl
from minisgl.plugins.grammar.base import (
    Grammars,
    Matcher,
    masks_with_rollback,
    read_choices,
    read_json,
    refuse,
    token_bytes,
)
from minisgl.plugins.grammar.frame import lark_of
from minisgl.plugins.grammar.schema import strict
from minisgl.sampling_params import Grammar

if TYPE_CHECKING:
    from minisgl.tokenizer import Tokenizer

JSON_OPTIONS = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
"""The form of JSON: that of `json.dumps`, as in `minisgl.plugins.grammar.schema`."""
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 50_000,
    "max_lexer_states": 20_000,
    "step_max_items": 20_000,
}
"""Limits of `llguidance.LLParserLimits`: some hundredths of a second for a mask, where its own allow seconds."""
MAX_SECONDS = 1.0
"""The largest processor time to compile a grammar and to find the first tokens. Its limits do not cover all work."""
KEPT_LEXERS = 64
"""The largest number of lexers that are kept for further requests, of all grammars together."""
QUICK_SECONDS = 0.02
"""The longest processor time to compile a grammar once more, so that answers with it have lexers of their own."""
KEPT_TEXTS, SHORT = 4096, 512
"""The number of texts whose tokens are kept, and the largest number of characters of such a text."""
MAX_THREADS = 16
"""The largest number of threads that compute masks."""
MAX_MULTIPLE = 10_000
"""The largest ``multipleOf``, without its decimal point: it takes as many states."""


@dataclass
class LLGuidance:
    """The kinds of ``plain``, most of JSON schema, and grammars of Lark (https://github.com/guidance-ai/llguidance)."""

    forcing: bool = True
    """Where only one text is possible, allow only the tokens that the tokenizer makes of it. If false, any tokens with
    this text are allowed, as in ``plain``."""

    def build(self, tokenizer: Tokenizer) -> LLGuidanceGrammars:
        return LLGuidanceGrammars(tokenizer, self.forcing)


class _Vocabulary:
    """The attributes that `llguidance.LLTokenizer` reads of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, tokens: Sequence[bytes], end_id: int):
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id, self.tokens = end_id, None, list(tokens)
        self.special_token_ids = [token for token, data in enumerate(tokens) if not data]
        self._encode = functools.lru_cache(KEPT_TEXTS)(self._encode_new)

    def __call__(self, text: str) -> list[int]:
        # Where only one text is possible, each of its tokens asks for the tokens of the rest, in each answer again.
        return self._encode(text) if len(text) <= SHORT else self._encode_new(text)

    def _encode_new(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


class LLGuidanceGrammars(Grammars):
    """Checks grammars, and makes `llguidance.LLMatcher` objects."""

    def __init__(self, tokenizer: Tokenizer, forcing: bool):
        import llguidance

        super().__init__(tokenizer)
        self._forcing = forcing
        self._library = llguidance
        self._limits = llguidance.LLParserLimits(**LIMITS)
        self._kept: OrderedDict[tuple[Grammar, int], list[_Lexer]] = OrderedDict()
        self._llg_tokenizers: dict[int, Any] = {}  # by the number of tokens of their masks
        self._masks: dict[int, _Masks] = {}  # by the same

    def _source(self, grammar: Grammar) -> str:
        """Return the grammar in llguidance's own form. Raise `InvalidRequestError` if it is wrong."""
        match grammar.kind:
            case "json_schema":
                lark = "start: " + _json_rule(grammar, strict(read_json(grammar)))
            case "frame":
                lark = lark_of(grammar, partial(_json_rule, grammar), self._regex, self.special_tokens)
            case "regex":
                lark = f"start: /{self._regex(grammar.text)}/"
            case "choice":
                lark = "start: " + " | ".join(map(json.dumps, read_choices(grammar)))
            case _:
                lark = grammar.text
        if not self._forcing:
            lark = '%llguidance {"no_forcing": true}\n' + lark
        return str(self._library.LLMatcher.grammar_from_lark(lark))

    def _regex(self, pattern: str) -> str:
        return str(self._library.regex_to_lark(pattern, "dw"))

    def _check(self, grammar: Grammar) -> None:
        source = self._source(grammar)
        error = self._library.LLMatcher.validate_grammar(source, limits=self._limits)
        if error and not error.startswith("WARNING"):
            raise refuse(grammar, error.splitlines()[0])
        sizes = list(self._llg_tokenizers) or [self.tokenizer.vocab_size]
        self._llg_tokenizer(sizes[0])
        began = time.thread_time()
        matcher = self._compile(source, sizes[0])
        matcher.compute_bitmask()
        if matcher.is_error():
            raise refuse(grammar, matcher.get_error().splitlines()[0])
        if time.thread_time() - began > MAX_SECONDS:
            raise refuse(grammar, f"The grammar takes more than {MAX_SECONDS:g} s to compile.")

    def _llg_tokenizer(self, vocab_size: int) -> Any:
        if vocab_size not in self._llg_tokenizers:
            from llguidance._tokenizer import TokenizerWrapper

            tokens = token_bytes(self.tokenizer, vocab_size)
            # llguidance gets one more token as the end of an answer. Where it may follow, `_mask` allows all end ids.
            wrapper = TokenizerWrapper(_Vocabulary(self.tokenizer, [*tokens, b""], vocab_size))
            made = self._library.LLTokenizer(wrapper, n_vocab=vocab_size + 1, eos_token=vocab_size)
            self._llg_tokenizers[vocab_size] = made
        return self._llg_tokenizers[vocab_size]

    def _compile(self, source: str, vocab_size: int) -> Any:
        tokenizer = self._llg_tokenizer(vocab_size)
        return self._library.LLMatcher(tokenizer, source, log_level=0, limits=self._limits)

    def _allows_prefix(self, grammar: Grammar) -> bool:
        whole = msgspec.structs.replace(grammar, prefix="")
        return self._matcher(whole, self.tokenizer.vocab_size, ()).read(grammar.prefix)

    def _matcher(self, grammar: Grammar, vocab_size: int, end_ids: Sequence[int]) -> LLGuidanceMatcher:
        tokenizer = self._llg_tokenizer(vocab_size)
        lexer = self._lexer(grammar, vocab_size)
        if vocab_size not in self._masks:
            self._masks[vocab_size] = _Masks(self._library, vocab_size)
        return LLGuidanceMatcher(lexer, tokenizer, self._masks[vocab_size], end_ids)

    def _lexer(self, grammar: Grammar, vocab_size: int) -> _Lexer:
        """Return the lexer for a new answer: a kept one without answers, else a new one.

        If there are enough, or the grammar compiles slowly, it is the one with the fewest answers.
        """
        kept = [each for each in self._kept.pop((grammar, vocab_size), []) if not each.is_full]
        lexer = min(kept, key=lambda each: len(each.users), default=None)
        if lexer is None or (lexer.users and len(kept) < MAX_THREADS and kept[0].seconds < QUICK_SECONDS):
            lexer = _Lexer(partial(self._compile, self._source(grammar), vocab_size))
            kept.append(lexer)
        self._kept[grammar, vocab_size] = kept
        while len(self._kept) > 1 and sum(map(len, self._kept.values())) > KEPT_LEXERS:
            self._kept.popitem(last=False)
        return lexer


def check_multiples(grammar: Grammar, schema: Any) -> None:
    """Refuse a JSON schema with a large ``multipleOf``."""
    todo = [schema]
    while todo:
        part = todo.pop()
        todo += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        multiple = part.get("multipleOf") if isinstance(part, dict) else None
        if isinstance(multiple, int | float) and digits_of(multiple) > MAX_MULTIPLE:
            raise refuse(grammar, f"multipleOf has a value above {MAX_MULTIPLE}, without its decimal point.")


def digits_of(number: float) -> int:
    """Return the absolute value of a number without its decimal point: 25 for 0.25."""
    return int("".join(map(str, Decimal(repr(number)).as_tuple().digits)))


def _json_rule(grammar: Grammar, schema: Any) -> str:
    """Return the body of the rule of a JSON schema of a grammar, in llguidance's form of Lark."""
    if not isinstance(schema, dict):
        schema = {} if schema is True else {"not": {}}
    check_multiples(grammar, schema)
    return "%json " + json.dumps(schema | {"x-guidance": JSON_OPTIONS})


class _Lexer:
    """A compiled grammar, with the lexer that llguidance extends while answers use it.

    All copies of an `llguidance.LLMatcher` share its lexer. So their masks are computed one after another, in however
    many threads, and the states that all answers have reached count for the limit of states. Where a grammar compiles
    quickly, simultaneous answers have different lexers.
    """

    def __init__(self, compile_matcher: Callable[[], Any]):
        began = time.thread_time()
        self._compile, self._first = compile_matcher, compile_matcher()
        self.seconds = time.thread_time() - began
        """Processor time that the compilation took."""
        self.answers = 0
        """Number of answers that have used it."""
        self.users: weakref.WeakSet[LLGuidanceMatcher] = weakref.WeakSet()
        self.is_full = False
        """Whether an answer has failed with it, perhaps at a limit. No new answer should use it."""

    def matcher(self) -> Any:
        """Return an `llguidance.LLMatcher` at the beginning of a new answer."""
        self.answers += 1
        return self._first.deep_copy()

    def new(self) -> _Lexer:
        """Return a lexer of the same grammar that has no states yet."""
        return _Lexer(self._compile)


class _Masks:
    """Computes masks of many answers at once, in several threads.

    When the scheduler asks for the mask of one answer, the masks of all answers that have a new token since then are
    computed, because the scheduler asks for them in the same step. ``vocab_size`` is the number of tokens of a mask.
    llguidance has one more, the end of an answer.
    """

    def __init__(self, library: Any, vocab_size: int):
        self._vocab_size, self._words = vocab_size, -(-vocab_size // 32)
        self._width = -(-(vocab_size + 1) // 32)
        self._executor = library.LLExecutor(min(MAX_THREADS, os.cpu_count() or 1))
        self._waiting: dict[int, LLGuidanceMatcher] = {}

    def expect(self, matcher: LLGuidanceMatcher) -> None:
        """Note that the mask of ``matcher`` will be needed."""
        self._waiting[id(matcher)] = matcher

    def fill(self) -> None:
        """Compute the masks of all matchers that wait."""
        matchers, self._waiting = list(self._waiting.values()), {}
        for matcher, mask in zip(matchers, self.find(matchers), strict=True):
            failed = matcher.library.is_error()
            matcher.mask = self.find([matcher])[0] if failed and matcher.go_on() else mask

    def find(self, matchers: Sequence[LLGuidanceMatcher]) -> I32:
        """Return the masks of ``matchers``, ``[matchers, ceil(vocab_size / 32)]``. After an error, no bit is set."""
        bits = np.zeros((len(matchers), self._width), np.int32)
        work = [(matcher.library, i) for i, matcher in enumerate(matchers) if not matcher.library.is_error()]
        if work:
            self._executor.unsafe_compute_mask_ptr(work, bits.ctypes.data, 4 * self._width, len(matchers))
        word, bit = divmod(self._vocab_size, 32)
        ended = np.flatnonzero(bits[:, word] >> bit & 1).tolist()  # a matcher that fails now has this bit, too
        bits[:, word] &= np.int32((1 << bit) - 1)
        for i in ended:
            if matchers[i].library.is_accepting():
                view = bits[i].view(np.uint32)
                for token in matchers[i].end_ids:
                    view[token // 32] |= np.uint32(1 << (token % 32))
        return bits[:, : self._words]


class LLGuidanceMatcher(Matcher):
    """One answer in llguidance. After an error, it allows no token.

    ``library`` is llguidance's matcher. ``mask`` is the next mask, or None until `_Masks` has filled it in.
    """

    def __init__(self, lexer: _Lexer, tokenizer: Any, masks: _Masks, end_ids: Sequence[int]):
        self._tokenizer, self._masks, self.end_ids = tokenizer, masks, end_ids
        self.mask: I32 | None = None
        self._read: list[int] = []  # all tokens so far, those of `read` included
        self._use(lexer)

    def _use(self, lexer: _Lexer) -> None:
        self._lexer, self.library = lexer, lexer.matcher()
        lexer.users.add(self)  # for as long as this object exists

    def go_on(self) -> bool:
        """After an error: begin again with a new lexer, in case other answers have filled it. Return whether it helped.

        Drafts that are consumed at the moment are forgotten.
        """
        if self._lexer.answers == 1:
            return False
        self._lexer.is_full = True
        self._use(self._lexer.new())
        return bool(self.library.consume_tokens(self._read))

    def advance(self, tokens: Sequence[int]) -> None:
        tokens = [token for token in tokens if token not in self.end_ids]
        self._read += tokens
        if not self.library.consume_tokens(tokens):
            self.go_on()
        self.mask = None
        self._masks.expect(self)

    def read(self, text: str) -> bool:
        tokens = self._tokenizer.greedy_tokenize(text)
        self._read += tokens
        return bool(self.library.try_consume_tokens(tokens) == len(tokens))

    def masks(self, drafts: Sequence[int]) -> I32:
        if self.mask is None:
            self._masks.expect(self)
            self._masks.fill()
        assert self.mask is not None
        known = [self.mask]  # the mask before the drafts

        def mask() -> I32:
            found: I32 = known.pop() if known else self._masks.find([self])[0]
            return found

        def consume(token: int) -> bool:
            if token in self.end_ids:
                return False
            # After an error, as when a limit is reached, the next mask forbids all tokens.
            return bool(self.library.try_consume_tokens([token]) == 1 or self.library.is_error())

        found = masks_with_rollback(drafts, mask, consume, self.library.rollback)
        if drafts and self.library.is_error() and self.go_on():
            self.mask = None
            return self.masks(drafts)
        return found

    def allowed(self, drafts: Sequence[int]) -> int:
        end = next((k for k, draft in enumerate(drafts) if draft in self.end_ids), len(drafts))
        count: int = self.library.validate_tokens(list(drafts[:end]))
        return count + (count == end < len(drafts) and self._ends_after(drafts[:end], self.library.is_accepting))

    def forced(self, count: int) -> Sequence[int]:
        tokens: list[int] = self.library.compute_ff_tokens()
        if not tokens:  # with forcing=False: without the tokens at the end that may go on in another way
            tokens = self._tokenizer.tokenize_partial(self.library.compute_ff_bytes())[0]
        if len(tokens) < count and self._ends_after(tokens, self.library.is_stopped):
            tokens = [*tokens, *self.end_ids[:1]]
        return tokens[:count]

    def _ends_after(self, tokens: Sequence[int], test: Callable[[], bool]) -> bool:
        """Return the result of ``test()`` after ``tokens``, which are then taken back."""
        consumed = self.library.try_consume_tokens(list(tokens))
        ends = bool(test() and not self.library.is_error())
        self.library.rollback(consumed)
        return ends


@hookimpl
def minisgl_configs() -> Any:
    yield "grammar", "llguidance", LLGuidance

"""What the plugins of the group ``grammar`` share: reading of requests, and matchers that compile in another thread."""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from minisgl.core import I32
from minisgl.plugins.constraint.base import Constraint
from minisgl.sampling_params import Grammar, InvalidRequestError

if TYPE_CHECKING:
    from minisgl.tokenizer import Tokenizer

log = logging.getLogger(__name__)
MAX_CHOICES = 1024
"""The largest number of texts to choose from."""
KEPT_CHECKS = 128
"""The number of right grammars that are remembered, of at most 64 KiB each."""


def refuse(grammar: Grammar, why: object) -> InvalidRequestError:
    """Return the error for a grammar that can't be used."""
    return InvalidRequestError(grammar.field, str(why), "unsupported_grammar")


def read_json(grammar: Grammar) -> Any:
    """Return the value of a grammar whose text is JSON: a schema, or a list of choices. Raise `InvalidRequestError`."""
    try:
        value = json.loads(grammar.text)
        json.dumps(value, ensure_ascii=False).encode()  # raises UnicodeEncodeError for half of a surrogate pair
    except (ValueError, RecursionError) as error:
        raise refuse(grammar, f"This is not valid JSON: {error}.") from None
    return value


def read_choices(grammar: Grammar) -> list[str]:
    """Return the texts that a grammar of the kind ``choice`` allows. Raise `InvalidRequestError` for a wrong one."""
    choices = read_json(grammar)
    if not isinstance(choices, list) or not choices or not all(isinstance(text, str) and text for text in choices):
        raise refuse(grammar, "The choices must be a list of strings that are not empty.")
    if len(choices) > MAX_CHOICES:
        raise refuse(grammar, f"There are at most {MAX_CHOICES} choices.")
    return choices


def token_bytes(tokenizer: Tokenizer, vocab_size: int) -> list[bytes]:
    """Return the bytes that each token adds to a text: none for special tokens, which no grammar allows."""
    return [tokenizer.decoded_bytes(token) for token in range(vocab_size)]


def special_bytes(token: int) -> bytes:
    """Return bytes for a special token, which has no text: they begin with 0xFF, which no text has."""
    return b"\xff%d\xfe" % token


def bytes_to_read(tokenizer: Tokenizer, vocab_size: int) -> list[bytes]:
    """Return the bytes with which an automaton reads each token, such as `special_bytes` for special tokens."""
    texts = [b"" if 0xFF in text else text for text in token_bytes(tokenizer, vocab_size)]
    for token in tokenizer.skipped:
        if token < vocab_size:
            texts[token] = special_bytes(token)
    return texts


class Grammars:
    """Makes the matchers of one scheduler. Subclasses define `_check` and `_matcher`.

    Compiling a grammar may take a while, and the first one also prepares the vocabulary. A thread does both, while the
    scheduler computes other requests: this one enters the waiting queue when its matcher is ready.
    """

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        special = tokenizer.skipped
        self.special_tokens = {tokenizer.token_bytes(token).decode("utf-8", "replace"): token for token in special}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._checked: OrderedDict[Grammar, None] = OrderedDict()

    def check(self, grammar: Grammar) -> None:
        """Raise `InvalidRequestError` for a grammar that can't be used. The last right ones are remembered."""
        if grammar not in self._checked:
            self._check(grammar)
            if grammar.prefix and not self._allows_prefix(grammar):
                message = f"The text of the last message is not the beginning of an answer that {grammar.field} allows."
                raise InvalidRequestError("messages", message)
        self._checked[grammar] = None
        self._checked.move_to_end(grammar)
        if len(self._checked) > KEPT_CHECKS:
            self._checked.popitem(last=False)

    def _check(self, grammar: Grammar) -> None:
        """Do `check` for a grammar that is new."""
        raise NotImplementedError

    def _allows_prefix(self, grammar: Grammar) -> bool:
        """Return whether an answer may begin with the text before it."""
        raise NotImplementedError

    def _matcher(self, grammar: Grammar, vocab_size: int, end_ids: Sequence[int]) -> Matcher:
        """Return a matcher at the beginning of an answer. ``end_ids`` may follow where an answer may end."""
        raise NotImplementedError

    def _begun(self, grammar: Grammar, vocab_size: int, end_ids: Sequence[int]) -> Matcher:
        """Return a matcher that has read the text before the answer."""
        matcher = self._matcher(msgspec.structs.replace(grammar, prefix=""), vocab_size, end_ids)
        if grammar.prefix:
            matcher.read(grammar.prefix)
        return matcher

    def constraint(self, grammar: Grammar, vocab_size: int, end_ids: Sequence[int]) -> Constraint:
        """Return a matcher for a request. Masks have ``vocab_size`` tokens; ``end_ids`` end an answer."""
        return _Later(self._pool.submit(self._begun, grammar, vocab_size, tuple(end_ids)), vocab_size)


class Matcher(Constraint):
    """What a plugin makes of a grammar."""

    def read(self, text: str) -> bool:
        """Go on as if the answer began with ``text``, in whatever tokens. Return False if the grammar forbids it.

        Only a new matcher can do this. A thread may call it while others of the same grammar are in use.
        """
        raise NotImplementedError


class _Later(Constraint):
    """A matcher that a thread makes. If that fails, or a call of the matcher, no token is allowed: the request ends."""

    def __init__(self, made: Future[Matcher], vocab_size: int):
        self._made, self._vocab_size = made, vocab_size
        self._failed = False

    def is_ready(self, seconds: float = 0.0) -> bool:
        return self._made.done() or (seconds > 0 and bool(wait([self._made], seconds).done))

    def _call(self, name: str, given: Any) -> Any:
        """Return ``name(given)`` of the matcher, or None if it has failed."""
        if not self._failed:
            try:
                return getattr(self._made.result(), name)(given)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException:  # a panic in Rust is no Exception
                log.exception("A grammar failed. Its request ends with an error.")
                self._failed = True
        return None

    def advance(self, tokens: Sequence[int]) -> None:
        self._call("advance", tokens)

    def masks(self, drafts: Sequence[int]) -> I32:
        found: I32 | None = self._call("masks", drafts)
        return np.zeros((1 + len(drafts), -(-self._vocab_size // 32)), np.int32) if found is None else found

    def allowed(self, drafts: Sequence[int]) -> int:
        return self._call("allowed", drafts) or 0

    def forced(self, count: int) -> Sequence[int]:
        return self._call("forced", count) or ()


def masks_with_rollback(
    drafts: Sequence[int], mask: Callable[[], I32], consume: Callable[[int], bool], roll_back: Callable[[int], None]
) -> I32:
    """Return the masks before the first draft and after each: consume the drafts, one by one, and take them back.

    ``consume(token)`` returns False, and changes nothing, if the grammar forbids the token. The masks after it are
    those before it: they have no effect.
    """
    if not drafts:
        return mask()[None].copy()  # who gets a mask may change it, and a matcher keeps its own
    found, consumed = [mask()], 0
    for draft in drafts:
        if consumed == len(found) - 1 and consume(draft):
            consumed += 1
            found.append(mask())
        else:
            found.append(found[-1])
    if consumed:
        roll_back(consumed)
    return np.stack(found)

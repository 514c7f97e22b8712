"""What checks the grammars of requests and makes the masks of their tokens: a plugin of the group ``grammar``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from minisgl.plugin_manager.discovery import BUILT_IN, exists
from minisgl.sampling_params import Grammar, InvalidRequestError

if TYPE_CHECKING:
    from minisgl.plugin_manager.manager import PluginManager
    from minisgl.plugins.constraint.base import Constraint
    from minisgl.tokenizer.tokenizer import Tokenizer

NEEDED = ("constraint/base", "constraint/manager")
"""The plugins without which no grammar can be followed."""


class Grammars(Protocol):
    """What a plugin of the group ``grammar`` builds: it knows the tokenizer, and reads grammars."""

    def check(self, grammar: Grammar) -> None:
        """Raise `InvalidRequestError` for a grammar that is wrong or not supported. Called in a tokenizer's process."""

    def constraint(self, grammar: Grammar, vocab_size: int, end_ids: Sequence[int]) -> Constraint:
        """Return the constraint of a new request, whose grammar was checked. Called in rank 0's process.

        It must return soon, since all other requests wait: what takes long is for a thread, and the constraint is not
        ready before (`Constraint.is_ready`). Masks have ``vocab_size`` tokens. The tokens ``end_ids`` end
        an answer: they are allowed where the grammar allows an end.
        """


class LazyGrammars:
    """The part of the group ``grammar``, built for the first request that has a grammar.

    ``options()`` returns the options of the part, or None if there is none. Without a part or a tokenizer, each grammar
    is refused.
    """

    def __init__(self, options: Callable[[], Any], manager: PluginManager, tokenizer: Tokenizer | None):
        self._options, self._manager, self._tokenizer = options, manager, tokenizer
        self._made: Grammars | None = None

    def _make(self, grammar: Grammar) -> Grammars:
        if self._made is None:
            missing = [name for name in NEEDED if not exists(f"{BUILT_IN}.{name.replace('/', '.')}")]
            if missing:
                what = f"A grammar needs the plugin plugins/{missing[0]}, which is missing."
                raise InvalidRequestError(grammar.field, what)
            options = None if self._tokenizer is None else self._options()
            if options is None:
                raise InvalidRequestError(
                    grammar.field,
                    "An answer can't follow a grammar here: there is no tokenizer, or no plugin of the group grammar.",
                )
            self._made = self._manager.build("grammar", options, tokenizer=self._tokenizer)
        return self._made

    def check(self, grammar: Grammar) -> None:
        """Raise `InvalidRequestError` for a grammar that can't be used."""
        self._make(grammar).check(grammar)

    def constraint(self, grammar: Grammar, vocab_size: int, end_ids: Sequence[int]) -> Constraint:
        """Return the constraint of a new request, whose grammar was checked."""
        return self._make(grammar).constraint(grammar, vocab_size, end_ids)

"""The kinds of grammars that become networks: choices, regular expressions, JSON schemas, and frames."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from minisgl.plugins.grammar.base import read_choices, read_json, refuse
from minisgl.plugins.grammar.characters import utf8
from minisgl.plugins.grammar.frame import expression_of
from minisgl.plugins.grammar.network import GrammarTooLargeError, Network, choice, literal
from minisgl.plugins.grammar.regex import RegexError, parse
from minisgl.plugins.grammar.schema import SchemaError, grammar_of, strict
from minisgl.sampling_params import Grammar


def network_of(grammar: Grammar, tokens: Mapping[str, int] = MappingProxyType({})) -> Network:
    """Return a grammar as a network. ``tokens`` are special tokens by their texts.

    Raise `InvalidRequestError` if it is wrong or not supported.
    """
    try:
        match grammar.kind:
            case "json_schema":
                return Network(grammar_of(strict(read_json(grammar))))
            case "regex":
                return Network(parse(grammar.text, utf8, anchored=True))
            case "choice":
                return Network(choice(*(literal(text.encode()) for text in read_choices(grammar))))
            case "frame":
                return Network(expression_of(grammar, tokens))
    except (RegexError, SchemaError, GrammarTooLargeError, RecursionError) as error:
        raise refuse(grammar, error) from None
    raise refuse(grammar, f"Only grammar=llguidance reads grammars of the kind {grammar.kind}.")

"""A model's chat template: from the turns of a conversation to the one text that the model was trained to continue.

Templates are programs in Jinja that come with a model; they run in a sandbox. What they may use is what Hugging Face
documents: huggingface.co/docs/transformers/chat_templating_writing.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser

from minisgl.core import InvalidRequestError


class _Generation(jinja2.ext.Extension):
    """``{% generation %}…{% endgeneration %}`` marks the assistant's words for training; here it is its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One template, compiled. Raises ValueError where it is not valid Jinja."""

    def __init__(self, source: str, special_tokens: Mapping[str, Any] | None = None):
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        self._special_tokens = dict(special_tokens or {})
        self._source = source
        try:
            self._template = environment.from_string(source)
            self._variables = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template is not valid Jinja: line {error.lineno}: {error.message}") from error

    def render(
        self, turns: Sequence[Mapping[str, Any]], generate: bool = True, extra: Mapping[str, Any] | None = None
    ) -> str:
        """The conversation as one text, special tokens included; ``generate`` ends it with the opening of the
        assistant's turn, ``extra`` are further variables. Raises `InvalidRequestError` where the template does, or
        where it never
        looks at something that was given."""
        for name in extra or ():
            if name not in self._variables:
                raise InvalidRequestError(
                    "chat_template_kwargs", f"This model's chat template has no variable {name!r}."
                )
        for name in {name for turn in turns for name in turn} - {"role", "content"}:
            if name not in self._source:
                raise InvalidRequestError(
                    "messages", f"This model's chat template has no place for a message's {name!r}."
                )
        variables = {"tools": None, "documents": None, **self._special_tokens, **(extra or {})}
        variables |= {"messages": turns, "add_generation_prompt": generate}
        try:
            return self._template.render(**variables)
        except Exception as error:  # a template is a program of somebody else's: whatever it raises is its verdict
            what = str(error) or type(error).__name__
            raise InvalidRequestError(
                "messages", f"The model's chat template does not take these messages: {what}"
            ) from error


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which is no use to a model."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

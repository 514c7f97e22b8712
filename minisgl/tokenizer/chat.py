"""A model's chat template: renders chat messages as the one text that the model was trained to continue.

A chat template is a Jinja program that is part of a checkpoint. It runs in Jinja's sandbox. The filters, functions and
variables available to a template are those of Hugging Face's documentation:
huggingface.co/docs/transformers/chat_templating_writing.
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

from minisgl.core import InvalidRequestError, shorten


class _Generation(jinja2.ext.Extension):
    """The block ``{% generation %}…{% endgeneration %}``, rendered as its content.

    The block marks the assistant's messages for training, and has no meaning for inference.
    """

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled chat template. The constructor raises ValueError if ``source`` is not valid Jinja.

    ``special_tokens`` are variables of the template, such as ``bos_token``.
    """

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
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the messages as one text, special tokens included.

        ``add_generation_prompt`` ends the text with the beginning of an assistant message. ``chat_template_kwargs`` are
        further variables of the template. Raise `InvalidRequestError` if the template raises an error, or if it never
        reads one of the given variables or message fields.
        """
        for name in chat_template_kwargs or ():
            if name not in self._variables:
                raise InvalidRequestError(
                    "chat_template_kwargs", f"This model's chat template has no variable {shorten(repr(name))}."
                )
        for name in {name for message in messages for name in message} - {"role", "content"}:
            if name not in self._source:
                raise InvalidRequestError(
                    "messages", f"This model's chat template does not use the message field {shorten(repr(name))}."
                )
        variables = {"tools": None, "documents": None, **self._special_tokens, **(chat_template_kwargs or {})}
        variables |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(**variables)
        except Exception as error:  # the template is the model's program and can raise any exception
            what = str(error) or type(error).__name__
            raise InvalidRequestError(
                "messages", f"The model's chat template can't render these messages: {shorten(what, 200)}"
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
    """Return ``value`` as JSON, without the HTML escapes of Jinja's own ``tojson``, which would alter the prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

"""A model's chat template: renders chat messages as the one text that the model was trained to continue.

A chat template is a Jinja program that is part of a checkpoint. It runs in Jinja's sandbox. The filters, functions and
variables available to a template are those of Hugging Face's documentation:
huggingface.co/docs/transformers/chat_templating_writing.

Clients send messages in the form of the OpenAI API. `normalize` converts them to the form that templates read. This
module knows nothing about tokens.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser

from minisgl.sampling_params import InvalidRequestError, shorten

Message = Mapping[str, Any]


@dataclass(frozen=True)
class RenderedChat:
    """A rendered chat. A plugin's chat has more, such as which of its special tokens are the client's text."""

    text: str

    def cut(self, length: int) -> RenderedChat:
        """Return the beginning of the chat, of at most ``length`` characters."""
        return RenderedChat(self.text[:length])


class _Generation(jinja2.ext.Extension):
    """The block ``{% generation %}…{% endgeneration %}``, rendered as its content.

    The block marks the assistant's messages for training, and has no meaning for inference.
    """

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        return [nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)]


def make_environment() -> jinja2.Environment:
    """Return Jinja's environment for chat templates, with their filters and functions."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    return environment


class RaisedByTemplate(jinja2.TemplateError):
    """An error that a template raised by ``raise_exception``."""


class ChatTemplate:
    """A compiled chat template. The constructor raises ValueError if ``source`` is not valid Jinja.

    ``special_tokens`` are variables of the template, such as ``bos_token``. ``variables`` are the names of all
    variables that the template reads.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, Any] | None = None,
        environment: jinja2.Environment | None = None,
    ):
        self._special_tokens = dict(special_tokens or {})
        try:
            environment = environment or make_environment()
            self._template = environment.from_string(source)
            self.variables = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template is not valid Jinja: line {error.lineno}: {error.message}") from error

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Return the messages as one text, special tokens included.

        ``add_generation_prompt`` ends the text with the beginning of an assistant message. ``chat_template_kwargs`` are
        further variables of the template, and ``tools`` is one of them. Raise `InvalidRequestError` if a message is
        wrong, or if the template raises an error.
        """
        chat = normalize(messages)
        kwargs = {**(chat_template_kwargs or {}), "tools": list(tools) or None}
        return self.render_once(chat, add_generation_prompt, kwargs)

    def render_once(
        self, messages: Sequence[Message], add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        """Return the text that the template writes for messages as they are. Raise `InvalidRequestError`."""
        own = {"documents": None, "add_generation_prompt": add_generation_prompt, "messages": messages}
        try:
            text = self._template.render({"tools": None, **variables, **self._special_tokens, **own})
            text.encode()
        except UnicodeEncodeError:
            raise InvalidRequestError(
                "messages", "The chat has half a surrogate pair, which is not a character."
            ) from None
        except RecursionError:
            raise InvalidRequestError("messages", "The messages have too many nested lists and objects.") from None
        except Exception as error:  # the template is the model's program and can raise any exception
            what = str(error) or type(error).__name__
            message = f"The model's chat template can't render these messages: {shorten(what, 200)}"
            raise InvalidRequestError("messages", message) from error
        return text


def _raise(message: str) -> NoReturn:
    raise RaisedByTemplate(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return ``value`` as JSON, without the HTML escapes of Jinja's own ``tojson``, which would alter the prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


# ---- messages ----------------------------------------------------------------------------------------


def normalize(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages of the OpenAI API in the form that templates read. Raise `InvalidRequestError` for a wrong one.

    A null field is a missing field, as in `transformers`. A content is a string. Lists of parts are refused, and so are
    tool calls: `tokenizer=auto` reads them.
    """
    found = []
    for i, message in enumerate(messages):
        new = {name: value for name, value in message.items() if value is not None}
        if not isinstance(new.get("content", ""), str):
            refuse(i, "the content must be a string; tokenizer=auto also reads a list of content parts")
        if new.get("tool_calls"):
            refuse(i, "tool calls are not supported by this tokenizer: use tokenizer=auto")
        found.append(new)
    return found


def strings_of(value: Any) -> list[str]:
    """Return all strings in a JSON value, keys included."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    return [text for item in value for text in strings_of(item)] if isinstance(value, list | tuple) else []


def refuse(i: int, what: str) -> NoReturn:
    """Raise `InvalidRequestError` for the message number ``i``."""
    raise InvalidRequestError("messages", f"messages[{i}]: {what}.")

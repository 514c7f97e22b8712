"""A model's chat template: renders chat messages as the one text that the model was trained to continue.

A chat template is a Jinja program that is part of a checkpoint. It runs in Jinja's sandbox. The filters, functions and
variables available to a template are those of Hugging Face's documentation:
huggingface.co/docs/transformers/chat_templating_writing.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser

from minisgl.core import InvalidRequestError, shorten

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""The roles that every chat template is given. A template may compare the role of a message with others."""
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The variables of a template that are the texts of special tokens."""
RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize", "chat_template"}
).union(SPECIAL_TOKENS)
"""The variables of a template that ``chat_template_kwargs`` can't set, beside the functions of templates."""
_STAND_INS = "minisgl_stand_ins"


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

    ``special_tokens`` are variables of the template, such as ``bos_token``. ``literals`` are all texts in the source.
    ``sought`` are those that the template may look for in a message, and ``roles`` the roles that it handles: `ROLES`,
    and each word with which it compares a role.
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
            parsed = environment.parse(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template is not valid Jinja: line {error.lineno}: {error.message}") from error
        self._reserved = RESERVED.union(environment.globals)
        self.literals = frozenset(_texts(parsed, deep=True)) | frozenset(map(str, self._special_tokens.values()))
        looking = parsed.find_all((nodes.Compare, nodes.Call, nodes.Filter, nodes.Test, nodes.Assign))
        self.sought = frozenset(text for node in looking for text in _texts(node) if text)
        self.roles = frozenset(ROLES).union(
            text for node in parsed.find_all(nodes.Compare) if _names_role(node) for text in _texts(node)
            if re.fullmatch(r"\w[\w-]*", text)
        )  # fmt: skip
        self._variables = jinja2.meta.find_undeclared_variables(parsed)  # folds constants in ``parsed``

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        stand_ins: Collection[str] = (),
    ) -> str:
        """Return the messages as one text, special tokens included.

        ``add_generation_prompt`` ends the text with the beginning of an assistant message. ``chat_template_kwargs`` are
        further variables of the template. ``stand_ins`` are characters that `_tojson` must not escape. Raise
        `InvalidRequestError` if the template raises an error, if it never reads one of the given variables or message
        fields, for a role that it does not handle, or for a message without content.
        """
        self._check_variables(chat_template_kwargs or {})
        self._check_messages(messages)
        variables = {"tools": None, "documents": None, **self._special_tokens, **(chat_template_kwargs or {})}
        variables |= {"messages": messages, "add_generation_prompt": add_generation_prompt, _STAND_INS: stand_ins}
        try:
            return self._template.render(**variables)
        except Exception as error:  # the template is the model's program and can raise any exception
            what = str(error) or type(error).__name__
            raise InvalidRequestError(
                "messages", f"The model's chat template can't render these messages: {shorten(what, 200)}"
            ) from error

    def _check_variables(self, chat_template_kwargs: Mapping[str, Any]) -> None:
        for name in chat_template_kwargs:
            if name in self._reserved:
                raise InvalidRequestError(
                    "chat_template_kwargs", f"chat_template_kwargs can't set {name!r}: the server itself sets it."
                )
            if name not in self._variables:
                raise InvalidRequestError(
                    "chat_template_kwargs", f"This model's chat template has no variable {shorten(repr(name))}."
                )

    def _check_messages(self, messages: Sequence[Mapping[str, Any]]) -> None:
        for name in {name for message in messages for name in message} - {"role", "content"}:
            if name not in self._source:
                raise InvalidRequestError(
                    "messages", f"This model's chat template does not use the message field {shorten(repr(name))}."
                )
        for message in messages:
            role = message.get("role")
            if not isinstance(role, str) or role not in self.roles:
                others = sorted(self.roles.difference(ROLES))
                raise InvalidRequestError(
                    "messages",
                    f"A message has the role {shorten(repr(role))}. This model's chat template handles: "
                    f"{shorten(', '.join([*ROLES, *others]), 200)}.",
                )
            if message.get("content") is None and not (role == "assistant" and message.get("tool_calls")):
                raise InvalidRequestError(
                    "messages",
                    f"A message of the role {role!r} has no content: only an assistant's message with tool_calls "
                    "may have none.",
                )


def _texts(node: nodes.Node, deep: bool = False) -> Iterator[str]:
    """Yield the texts that are part of an expression: a comparison's operands, a call's arguments, a list's items.

    ``deep`` yields all texts below the node, also those outside expressions.
    """
    for child in node.find_all((nodes.Const, nodes.TemplateData)) if deep else node.iter_child_nodes():
        if isinstance(child, nodes.Const | nodes.TemplateData):
            value = child.value if isinstance(child, nodes.Const) else child.data
            if isinstance(value, str):
                yield value
        elif not deep and isinstance(child, nodes.Operand | nodes.Keyword | nodes.List | nodes.Tuple):
            yield from _texts(child)


def _names_role(node: nodes.Node) -> bool:
    """Return whether an expression reads a role: a variable, a field or a key with this name."""
    keys = {child.attr for child in node.find_all(nodes.Getattr)} | {child.name for child in node.find_all(nodes.Name)}
    return "role" in keys or any(
        isinstance(child.arg, nodes.Const) and child.arg.value == "role" for child in node.find_all(nodes.Getitem)
    )


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


@jinja2.pass_context
def _tojson(
    context: jinja2.runtime.Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return ``value`` as JSON, without the HTML escapes of Jinja's own ``tojson``, which would alter the prompt."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if not ensure_ascii or text.isascii():
        return text
    stand_ins = context.get(_STAND_INS, ())
    return "".join(c if c.isascii() or c in stand_ins else json.dumps(c)[1:-1] for c in text)

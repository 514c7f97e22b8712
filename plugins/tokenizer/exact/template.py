"""A chat template that refuses what it would drop.

`CheckedTemplate` renders a chat twice: the second time with *marks*, which show whether each text of the messages was
written (`TextMarks`). It tries the forms of the messages that public templates read,
and refuses messages of which a text, a field or a variable would have no effect.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jinja2
import jinja2.meta

from minisgl.plugins.tokenizer.exact.messages import (
    REASONING,
    Lost,
    PrivateCharacters,
    TextMarks,
    TextPart,
    as_parts,
    as_string,
    as_system,
    has_parts,
    normalize,
    texts_of,
)
from minisgl.plugins.tokenizer.exact.template_source import (
    compared_roles,
    read_fields,
    separators,
    sought_texts,
    texts_below,
)
from minisgl.sampling_params import InvalidRequestError, shorten
from minisgl.tokenizer import chat
from minisgl.tokenizer.chat import ChatTemplate, Message, strings_of
from minisgl.tokenizer.tokenizer import SPECIAL_TOKENS
from minisgl.utils.json_file import is_neutral

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""The roles that every chat template is given. A template may compare the role of a message with others."""
RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize", "chat_template"}
).union(SPECIAL_TOKENS)
"""The variables of a template that ``chat_template_kwargs`` can't set, beside the functions of templates."""
FREE = ("role", "content", "name", "tool_call_id")
"""The fields of a message that a template need not read. A name is a hint; contents are checked in another way."""
_STAND_INS, _NOW = "minisgl_stand_ins", "minisgl_now"


@dataclass(frozen=True)
class RenderedChat(chat.RenderedChat):
    """A rendered chat. ``marked`` is its text with stand-ins, or None if no client's string needed a stand-in.

    If ``is_aligned`` is false, the template computed with the replaced characters, and ``marked`` is another text.
    """

    marked: str | None = None
    is_aligned: bool = True

    def cut(self, length: int) -> RenderedChat:
        """Return the beginning of the chat, of at most ``length`` characters."""
        is_marked = self.marked is not None and self.is_aligned
        return RenderedChat(self.text[:length], self.marked[:length] if is_marked and self.marked else None)


@dataclass(frozen=True)
class Replacement:
    """Messages and variables in which stand-ins replace some characters. ``restore`` undoes this in a text."""

    messages: Sequence[Message]
    kwargs: Mapping[str, Any]
    restore: Callable[[str], str]


class Replace(Protocol):
    """Return messages and variables with stand-ins, or None if they need no stand-ins."""

    def __call__(
        self, messages: Sequence[Message], kwargs: Mapping[str, Any], private: PrivateCharacters, /
    ) -> Replacement | None: ...


class _LostError(InvalidRequestError):
    """The refusal of messages of which some are not written. ``contents`` are the messages whose content is lost."""

    contents: frozenset[int] = frozenset()


class CheckedTemplate(ChatTemplate):
    """A compiled chat template, whose source was searched.

    ``literals`` are all texts in the source. ``sought`` are those that the template may look for in a message, and
    ``roles`` the roles that it handles: `ROLES`, and each word with which it compares a role. ``fields`` are the names
    that the template reads in some object.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, Any] | None = None):
        environment = chat.make_environment()
        environment.filters["tojson"] = _tojson
        environment.globals["strftime_now"] = _strftime_now
        super().__init__(source, special_tokens, environment)
        self._writes_tools = False  # whether a chat had another text with tools than without
        parsed = environment.parse(source)
        self._reserved = RESERVED.union(environment.globals)
        self.literals = frozenset(texts_below(parsed)) | frozenset(map(str, (special_tokens or {}).values()))
        self.sought = frozenset(sought_texts(parsed))
        self.roles = frozenset(ROLES).union(compared_roles(parsed))
        self.fields = frozenset(read_fields(parsed))
        self._separators = frozenset(separators(parsed))
        words = sorted(filter(re.compile("[0-9A-Za-z]").search, self.sought), key=len, reverse=True)
        self._sought_words = re.compile("|".join(map(re.escape, words)) or "(?!)")
        self._variables = jinja2.meta.find_undeclared_variables(parsed)  # folds constants in ``parsed``

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Return the messages as one text: see `render_checked`."""
        return self.render_checked(messages, add_generation_prompt, chat_template_kwargs, tools=tools).text

    def render_checked(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        replace: Replace = lambda messages, kwargs, private: None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> RenderedChat:
        """Return the messages as one text, special tokens included, and its copy with the stand-ins of ``replace``.

        ``add_generation_prompt`` ends the text with the beginning of an assistant message. ``chat_template_kwargs`` are
        further variables of the template, and ``tools`` is one of them. The contents are given to the template in the
        client's form, as a string or as a list of parts. If the template can't read this form, or writes nothing of a
        text, the other form is tried, and then the role ``system`` for that of a ``developer``.

        Raise `InvalidRequestError` if the template raises an error, if it never reads one of the given variables or
        message fields, if it does not write a text of a message, for a role that it does not handle, or for a message
        without content.
        """
        kwargs = chat_template_kwargs or {}
        self._check_variables(kwargs)
        self._check_messages(messages)
        kwargs = {**kwargs, "tools": list(tools)} if tools else kwargs
        try:
            given = normalize(messages)
            variables = {"add_generation_prompt": add_generation_prompt, _NOW: datetime.datetime.now()}
            attempt = functools.partial(self._render_form, variables, kwargs, replace)
            if self._reads_parts:
                with contextlib.suppress(InvalidRequestError):
                    return attempt([as_parts(message) for message in given])
            try:
                return _in_any_form(given, attempt)
            except InvalidRequestError as error:
                lost = error.contents if isinstance(error, _LostError) else range(len(given))
                if all(given[i]["role"] != "developer" for i in lost):
                    raise
                with contextlib.suppress(InvalidRequestError):
                    return _in_any_form([as_system(message) for message in given], attempt)
                raise
        except RecursionError:
            raise InvalidRequestError("messages", "The messages have too many nested lists and objects.") from None

    @functools.cached_property
    def _reads_parts(self) -> bool:
        """Whether the template writes a content only if it is a list of parts."""
        written = []
        for content in ("xyz", [TextPart(type="text", text="xyz")]):
            with contextlib.suppress(InvalidRequestError):
                variables = {"add_generation_prompt": True, _NOW: datetime.datetime.now()}
                text = self._render([{"role": "user", "content": content}], variables, {})
                if "xyz" in text.lower():
                    written.append(content)
        return bool(written) and "xyz" not in written

    def _render_form(
        self, variables: Mapping[str, Any], kwargs: Mapping[str, Any], replace: Replace, messages: Sequence[Message]
    ) -> RenderedChat:
        """Render messages in one form, and check that all their texts were written."""
        text = self._render(messages, variables, kwargs)
        private = PrivateCharacters([*self.literals, *texts_of(messages), *strings_of(kwargs)])
        replaced = replace(messages, kwargs, private)
        copy = replaced or Replacement(messages, kwargs, str)
        marks = TextMarks(copy.messages, private, self._sought_words, self._separators)
        marked = self._render_copy(marks.messages, variables, copy.kwargs, private.taken)
        unmarked = None if marked is None else marks.remove(marked)
        is_same = unmarked is not None and copy.restore(unmarked) == text
        self._check_written(messages, marks, marks.lost(marked or "", text, is_same, copy.restore))
        if replaced is None or is_same:
            return RenderedChat(text, None if replaced is None else unmarked)
        unmarked = self._render_copy(copy.messages, variables, copy.kwargs, private.taken)
        if unmarked is None:
            raise computed_with_special_tokens()
        return RenderedChat(text, unmarked, copy.restore(unmarked) == text)

    def _render_copy(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any],
        kwargs: Mapping[str, Any],
        taken: Collection[str],
    ) -> str | None:
        """Render messages with replaced characters. Return None if these characters cause an error."""
        try:
            return self._render(messages, variables, kwargs, taken)
        except InvalidRequestError:
            return None

    def _render(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any],
        kwargs: Mapping[str, Any],
        stand_ins: Collection[str] = (),
    ) -> str:
        """Render messages once. ``stand_ins`` are characters that `_tojson` must not escape."""
        prompt = variables["add_generation_prompt"]
        return self.render_once(messages, prompt, {**kwargs, _NOW: variables[_NOW], _STAND_INS: stand_ins})

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

    def _check_messages(self, messages: Sequence[Message]) -> None:
        for i, message in enumerate(messages):
            role = message.get("role")
            if not isinstance(role, str) or role not in self.roles:
                others = sorted(self.roles.difference(ROLES))
                raise InvalidRequestError(
                    "messages",
                    f"messages[{i}] has the role {shorten(repr(role))}. This model's chat template handles: "
                    f"{shorten(', '.join([*ROLES, *others]), 200)}.",
                )
            if message.get("content") is None and not (role == "assistant" and message.get("tool_calls")):
                raise InvalidRequestError(
                    "messages",
                    f"messages[{i}], of the role {role!r}, has no content: only an assistant's message with tool_calls "
                    "may have none.",
                )

    def _check_written(self, messages: Sequence[Message], marks: TextMarks, lost: Sequence[Lost]) -> None:
        """Raise `InvalidRequestError` for a text that is not written, and for a field that is not read.

        A template may drop a field that it reads, such as the reasoning of earlier turns, but not a content or a tool
        call. A name is a hint: the template may leave it out.
        """
        needed = ("content", "tool_calls", "arguments")
        lost = [a for a in lost if a.field != "name" and (a.field in needed or not self._reads(a.field))]
        if lost:
            i, field = lost[0].message, lost[0].field
            field = "tool_calls" if field == "arguments" else field
            error = _LostError(
                "messages",
                f"This model's chat template does not write messages[{i}].{shorten(field)} into the prompt "
                f"(the role is {messages[i]['role']!r}), so the model would not see it."
                if field == "content" or self._reads(field)
                else self._unused(i, field),
            )
            error.contents = frozenset(a.message for a in lost if a.field == "content")
            raise error
        for i, message in enumerate(messages):
            for field, value in message.items():
                if field in FREE or (i, field) in marks.checked or is_neutral(value):
                    continue
                if not self._reads(field):
                    raise InvalidRequestError("messages", self._unused(i, field))

    def check_tools(self, tools: Sequence[Mapping[str, Any]], text: str, without: Callable[[], str]) -> None:
        """Raise `InvalidRequestError` if a chat does not tell the model of each tool.

        ``text`` is the rendered chat, and ``without`` renders it without tools.
        """
        functions = [tool.get("function") for tool in tools]
        is_lost = any(isinstance(each, Mapping) and str(each.get("name", "")) not in text for each in functions)
        if is_lost or not (self._writes_tools or text != without()):
            raise InvalidRequestError(
                "tools",
                "The model's chat template does not write the tools into the prompt, so the model would not see them.",
            )
        self._writes_tools = True

    def _reads(self, field: str) -> bool:
        return not self.fields.isdisjoint(REASONING if field in REASONING else (field,))

    @staticmethod
    def _unused(i: int, field: str) -> str:
        field = REASONING[0] if field in REASONING else field
        return f"This model's chat template does not use the message field {shorten(repr(field))} of messages[{i}]."


def computed_with_special_tokens() -> InvalidRequestError:
    """Return the refusal of messages in which the text of a special token changes what the template computes."""
    return InvalidRequestError(
        "messages",
        "The messages contain the text of a special token, and the model's chat template computes with this text. "
        "Remove it from the messages, or start the server with parse_special_tokens=true.",
    )


def _in_any_form(messages: Sequence[Message], attempt: Callable[[Sequence[Message]], RenderedChat]) -> RenderedChat:
    """Return the first attempt that succeeds: contents as given, as strings, as parts, as parts where they are lost.

    If none does, raise the error of the attempt with strings, or of a later one that lost no content.
    """
    try:
        return attempt(messages)
    except InvalidRequestError as error:
        failed = error
    if any(map(has_parts, messages)):
        messages = [as_string(message) for message in messages]
        try:
            return attempt(messages)
        except InvalidRequestError as error:
            failed = error
    if not isinstance(failed.__cause__, chat.RaisedByTemplate):  # else the template must see the texts as strings
        every = [as_parts(message) for message in messages]
        lost = failed.contents if isinstance(failed, _LostError) else range(len(messages))
        some = [part if i in lost else message for i, (message, part) in enumerate(zip(messages, every, strict=True))]
        for parts in [every, some] if 0 < len(lost) < len(messages) else [every] if lost else []:
            try:
                return attempt(parts)
            except _LostError as error:
                failed = failed if error.contents else error
            except InvalidRequestError:
                pass
    raise failed


@jinja2.pass_context
def _strftime_now(context: jinja2.runtime.Context, form: str) -> str:
    """Return the time at which the chat was given: all renderings of a chat have one time."""
    now: datetime.datetime = context[_NOW]
    return now.strftime(form)


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

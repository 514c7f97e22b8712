"""Tools and reasoning in chats: `tools`, `tool_choice`, `parallel_tool_calls`, and reasoning apart from the answer.

The parsers of the groups ``tool_parser`` and ``reasoning_parser`` know how the model writes. A call that is forced
(``tool_choice`` is ``required`` or names a function) follows a grammar. The parameters are OpenAI's.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter

from minisgl import hookimpl
from minisgl.config import Config
from minisgl.message import ChatPrompt
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.http.apis.answer import AnswerReader, Part, PlainReader, partial_length
from minisgl.plugins.http.apis.chat_template import model_template
from minisgl.plugins.http.apis.full_answer import ReadForm
from minisgl.plugins.http.apis.parameters import FullChatRequest, FullFormat
from minisgl.sampling_params import Grammar, InvalidRequestError, SamplingParams, shorten
from minisgl.server.app import Api
from minisgl.server.errors import ApiError
from minisgl.server.extension import HttpExtension
from minisgl.server.protocol import AnswerForm
from minisgl.tokenizer.chat import ChatTemplate

if TYPE_CHECKING:
    from minisgl.plugins.reasoning_parser import ReasoningParser
    from minisgl.plugins.tool_parser import ToolParser

MAX_TOOLS = 512
"""The largest number of tools of a request."""
MAX_KEPT = 64
"""The number of ends of prompts that are kept, by the variables of the chat template."""
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def tool_name(tool: Mapping[str, Any]) -> str:
    """Return the name of a tool in the OpenAI API's form, or an empty text if it has none."""
    function = tool.get("function")
    return str(function.get("name", "")) if isinstance(function, Mapping) else ""


@hookimpl
def minisgl_http(config: Config) -> HttpExtension:
    return Tools(config)


class Tools(FullFormat):
    """Chooses the readers of chats' answers."""

    def __init__(self, config: Config):
        self._config = config
        self._tool_parser: ToolParser | None = None
        self._reasoning_parser: ReasoningParser | None = None
        self._api: Api | None = None
        self._template: ChatTemplate | None = None
        self._special: tuple[str, ...] = ()
        self._ends: OrderedDict[tuple[tuple[str, str], ...], str] = OrderedDict()

    def add_routes(self, router: APIRouter, api: Api) -> None:
        """Add no routes, but keep ``api``: before `begin`, it says that the server is starting."""
        self._api = api

    def begin(self, api: Api) -> None:
        manager = api.launcher.plugin_manager if api.launcher is not None else PluginManager.load(light=True)
        source, self._template, self._special = model_template(api)
        if self._config.tool_parser is not None:
            self._tool_parser = manager.build("tool_parser", self._config.tool_parser, template=source)
        if self._config.reasoning_parser is not None:
            self._reasoning_parser = manager.build("reasoning_parser", self._config.reasoning_parser, template=source)

    def answer_form(self, body: FullChatRequest) -> AnswerForm:
        choice = read_choice(body)
        if self._api is not None and self._api.dispatcher.spec is None:
            raise self._api.dispatcher.unavailable()
        if choice.tools and self._tool_parser is None:
            raise _wrong(
                "tools",
                "The server does not know how this model writes tool calls: its chat template has no form that a "
                "parser knows. The option tool_parser selects one.",
                "unsupported_parameter",
            )
        if choice.is_forced and body.continue_final_message:
            raise _wrong("tool_choice", "tool_choice asks for a tool call, and continue_final_message for a text.")
        end = "" if self._reasoning_parser is None else self._end_of_prompt(body)
        parser = self._reasoning_parser
        if parser is not None and parser.is_closed(end):
            parser = None
        is_open = parser is not None and parser.is_open(end)
        special = self._special if body.skip_special_tokens else ()
        begun, after = body.begun, "" if self._reasoning_parser is None else self._reasoning_parser.after
        if after and after in begun:
            begun = begun.rpartition(after)[2].lstrip()
        reads_all = getattr(self._tool_parser, "reads_all", False)
        tool_parser = self._tool_parser if choice.tools or reads_all else None
        return ToolForm(choice, tool_parser, parser, is_open, special, begun)

    def _end_of_prompt(self, body: FullChatRequest) -> str:
        """Return the end of the prompt of a chat with the same template variables, which is short.

        If the answer continues a message, it is the mark that began or ended the last reasoning in it. Such an answer
        has no reasoning unless the message is within one.
        """
        if body.continue_final_message:
            assert self._reasoning_parser is not None
            after, opener = self._reasoning_parser.after, self._reasoning_parser.opener
            return opener if body.begun.rfind(opener) > body.begun.rfind(after) else after
        known = frozenset[str]() if self._template is None else self._template.variables
        read = {name: value for name, value in body.optional_kwargs.items() if name in known}
        given = {**read, **body.chat_template_kwargs, "add_generation_prompt": body.add_generation_prompt}
        small = {k: v for k, v in given.items() if isinstance(v, bool | int | float | str) and len(str(v)) < 64}
        key = tuple(sorted((name, repr(value)) for name, value in small.items()))
        if key not in self._ends:
            try:
                chat = [{"role": "user", "content": "x"}]
                begins = bool(small.pop("add_generation_prompt"))
                text = "" if self._template is None else self._template.render(chat, begins, small)
            except InvalidRequestError:
                text = ""
            self._ends[key] = text[-64:]
            if len(self._ends) > MAX_KEPT:
                self._ends.popitem(last=False)
        self._ends.move_to_end(key)
        return self._ends[key]


# ---- what a request asks for -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """The tools that a model may call, ``tools``: they are empty if it may call none.

    ``is_forced``: it must call one. ``most`` is the largest number of calls; None: any number. ``field`` is the
    parameter that forces a call.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    is_forced: bool = False
    most: int | None = None

    @property
    def schemas(self) -> list[tuple[str, Any]]:
        """The name of each tool, and the JSON schema of its arguments, which are an object."""
        return [(tool_name(tool), _arguments(tool["function"].get("parameters"))) for tool in self.tools]


def _arguments(schema: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if schema is None:
        return NO_ARGUMENTS
    combined = any(key in schema for key in ("$ref", "anyOf", "allOf", "oneOf", "enum", "const"))
    return schema if combined else {**schema, "type": "object"}


def read_choice(body: FullChatRequest) -> Choice:
    """Read the parameters of tools of a chat. Raise `ApiError` for wrong ones."""
    tools = {tool["function"]["name"]: tool for tool in map(_tool, range(len(body.tools)), body.tools)}
    if len(tools) < len(body.tools):
        raise _wrong("tools", "Two tools have the same name.")
    if len(tools) > MAX_TOOLS:
        raise _wrong("tools", f"A request has at most {MAX_TOOLS} tools.")
    most = None if body.parallel_tool_calls else 1
    everything = tuple(tools.values())
    match body.tool_choice:
        case None | "auto":
            return Choice(everything, most=most)
        case "none":
            return Choice()
        case "required":
            names, mode = list(tools), "required"
        case {"type": "function", "function": {"name": str(name)}}:
            names, mode, most = [name], "required", 1
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(allowed)}}:
            names = [tool_name(each) if isinstance(each, dict) else "" for each in allowed]
        case _:
            raise _wrong(
                "tool_choice", "tool_choice must be none, auto, required, a function of tools, or allowed_tools."
            )
    if not names:
        raise _wrong("tool_choice", "tool_choice asks for a tool call, and there are no tools.")
    for name in names:
        if name not in tools:
            raise _wrong("tool_choice", f"tool_choice names {shorten(repr(name))}, which is none of the tools.")
    return Choice(tuple(tools[name] for name in dict.fromkeys(names)), mode == "required", most)


def _tool(i: int, tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tool as the chat template gets it. Raise `ApiError` for a wrong one."""
    where = f"tools[{i}]"
    if tool.get("type") != "function":
        raise _wrong("tools", f"{where}.type must be 'function': a model here can't call other tools.")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise _wrong("tools", f"{where}.function must be an object with a name.")
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise _wrong("tools", f"{where}.function.name must be 1 to 64 letters, digits, and characters of _.-")
    if not isinstance(description, str | None):
        raise _wrong("tools", f"{where}.function.description must be a string.")
    if not isinstance(function.get("parameters"), dict | None):
        raise _wrong("tools", f"{where}.function.parameters must be a JSON schema, an object.")
    if not isinstance(function.get("strict"), bool | None):
        raise _wrong("tools", f"{where}.function.strict must be true or false.")
    kept = {key: value for key, value in function.items() if value is not None and key != "strict"}
    return {**tool, "function": kept}


def _wrong(field: str, message: str, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, field, code)


# ---- the form of an answer ---------------------------------------------------------------------------------


class ToolForm(ReadForm):
    """The form of a chat's answer. ``parser`` is None for a chat that may call no tool, unless it reads all answers.

    ``reasoning`` is None if the model does not think; ``is_open``: the answer begins within its reasoning. ``special``
    are the texts of special tokens that the client does not want to see. ``begun`` is the text, without reasoning, that
    the answer continues.
    """

    def __init__(
        self,
        choice: Choice,
        parser: ToolParser | None,
        reasoning: ReasoningParser | None,
        is_open: bool,
        special: tuple[str, ...],
        begun: str = "",
    ):
        self._choice, self._parser, self._reasoning, self._is_open = choice, parser, reasoning, is_open
        self._begun = begun
        self._shown = parser.special if parser is not None else ()
        self._hidden = tuple(text for text in special if text not in self._shown)

    def prompt(self, prompt: ChatPrompt) -> ChatPrompt:
        return msgspec.structs.replace(prompt, tools=[dict(tool) for tool in self._choice.tools])

    def params(self, params: SamplingParams) -> SamplingParams:
        grammar, choice = params.grammar, self._choice
        if self._reasoning is not None and not self._reasoning.after and (grammar is not None or choice.is_forced):
            raise _wrong(
                "tool_choice" if grammar is None else grammar.field,
                "It can't be used with this model: its reasoning ends with no token after which a grammar could begin.",
                "unsupported_parameter",
            )
        if grammar is not None:
            grammar = msgspec.structs.replace(grammar, prefix=self._begun)
        if self._parser is not None and (choice.is_forced or grammar is not None):
            grammar = self._with_calls(self._parser, grammar)
        if grammar is not None and self._reasoning is not None:
            opener = "" if self._is_open else self._reasoning.opener
            grammar = msgspec.structs.replace(grammar, after=self._reasoning.after, opener=opener, prefix="")
        skip = params.skip_special_tokens and not self._shown
        if grammar is params.grammar and skip == params.skip_special_tokens:
            return params
        changed = msgspec.structs.replace(params, grammar=grammar, skip_special_tokens=skip)
        try:
            changed.check()
        except InvalidRequestError as error:
            raise ApiError.from_invalid(error) from None
        return changed

    def _with_calls(self, parser: ToolParser, grammar: Grammar | None) -> Grammar:
        """Return a grammar of answers that call a tool or, with ``grammar``, are one of its texts."""
        choice = self._choice
        try:
            frame = parser.frame(choice.schemas, choice.most)
        except InvalidRequestError as error:
            raise ApiError.from_invalid(error) from None
        text = json.dumps(frame, ensure_ascii=False)
        most = SamplingParams.MAX_GRAMMAR // 2
        if len(text) > most:
            what = f"The schemas of the tools of which one must be called have at most {most} characters."
            raise _wrong("tools", f"{what} Let tool_choice name one tool, or be auto.")
        if grammar is None or (choice.is_forced and grammar.kind == "json_schema"):
            return Grammar("frame", text, "tools")  # a forced call has no text that a format would be for
        if choice.is_forced:
            raise _wrong("tool_choice", f"tool_choice asks for a tool call, and {grammar.field} for another answer.")
        if grammar.kind != "json_schema" or self._shown:
            raise _wrong(
                grammar.field,
                f"{grammar.field} can't be used beside tools here: only JSON can, and with this model not even JSON."
                if self._shown
                else f"{grammar.field} can't be used beside tools: only a JSON schema can.",
            )
        try:
            schema = json.loads(grammar.text)
        except (ValueError, RecursionError):
            return grammar  # a tokenizer process refuses it
        both = {"any_of": [{"json_schema": schema}, frame]}
        return Grammar("frame", json.dumps(both, ensure_ascii=False), grammar.field, prefix=grammar.prefix)

    def reader(self) -> AnswerReader:
        reader: AnswerReader = PlainReader()
        if self._parser is not None:
            reader = self._parser.reader(dict(self._choice.schemas), self._choice.most, self._choice.is_forced)
        if self._reasoning is not None:
            reader = self._reasoning.reader(self._is_open, reader)
        return WithoutSpecial(self._hidden, reader) if self._shown and self._hidden else reader


class WithoutSpecial:
    """Gives the text without ``special`` to the reader ``then``.

    A parser may need a special token, such as ``[TOOL_CALLS]``, so that none are skipped while tokens become text.
    The special tokens that the client did not ask for are removed here.
    """

    def __init__(self, special: Sequence[str], then: AnswerReader):
        self._special, self._then, self._held = special, then, ""
        longest_first = sorted(special, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)))

    def feed(self, text: str) -> list[Part]:
        """Return the parts that are known after the next text."""
        text = self._pattern.sub("", self._held + text)
        end = len(text) - partial_length(text, *self._special)
        self._held = text[end:]
        return self._then.feed(text[:end])

    def finish(self) -> list[Part]:
        """Return the rest."""
        return (self._then.feed(self._held) if self._held else []) + self._then.finish()

"""A reader of tool calls in JSON, which the families' readers extend: `{"name": "f", "arguments": {…}}`.

The arguments stream as the model writes them: as soon as the name is known, a call begins, and it can't be taken back.
What is no call by then is content, unchanged. Each step of the reader depends only on the text up to a place, and not
on how this text was split.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar

from minisgl.plugins.http.apis.answer import CallArguments, CallBegin, Content, Part, partial_length

HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
"""The beginning of a call, up to its arguments."""
MAX_HEAD = 512
"""The largest number of characters before the arguments of a call that has no mark."""


class JsonScan:
    """Finds the end of a JSON object, of which ``depth`` braces are open."""

    def __init__(self, depth: int = 0):
        self._depth, self._in_string, self._escaped = depth, False, False

    def feed(self, text: str) -> int:
        """Return the number of characters of the next text up to the object's end, or -1 if it does not end there."""
        for i, character in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return i + 1
        return -1


class CallReader:
    """Reads content until ``opener``, then calls. A family's reader defines `_after`, and may define `_between`.

    The attribute ``_state`` is the method that reads the next text: it takes text from ``_buffer``, adds parts to
    ``_parts`` and returns whether it can go on. ``_given`` is text that is content if no call follows.
    """

    opener: ClassVar[str]
    any_order: ClassVar[bool] = True
    """Whether the name may also come after the arguments. Such a call is read when it is complete."""

    def __init__(self, tools: Collection[str], most: int | None = None):
        self._tools, self._most = tools, most
        self._buffer, self._given, self._parts = "", "", list[Part]()
        self._num_calls, self._strip = 0, False
        self._is_final = False
        self._state: Callable[[], bool] = self._text
        self._scan, self._scanned = JsonScan(), 0

    def feed(self, text: str) -> list[Part]:
        """Return the parts that are known after the next text."""
        self._buffer += text
        while self._buffer and self._state():
            pass
        parts, self._parts = self._parts, []
        return parts

    def finish(self) -> list[Part]:
        """Return the rest. A call that is not complete stays as far as it goes."""
        self._is_final = True
        parts = self.feed("")
        if self._given or self._state in (self._text, self._head, self._between):
            self._emit(self._given + self._buffer)
        parts += self._parts
        self._buffer, self._given, self._parts = "", "", []
        return parts

    def new_id(self) -> str:
        """Return the id of a new call."""
        return f"call_{uuid.uuid4().hex[:24]}"

    # ---- the parts -----------------------------------------------------------------------------------------

    def _emit(self, text: str) -> None:
        """Add content. White space after a call is left out."""
        text = text.lstrip() if self._strip else text
        if text:
            self._strip = False
            self._parts.append(Content(text))

    def _begin(self, name: str) -> None:
        self._num_calls += 1
        self._strip, self._given = True, ""
        if self._counts:
            self._parts.append(CallBegin(self._num_calls - 1, self.new_id(), name))

    @property
    def _counts(self) -> bool:
        return self._most is None or self._num_calls <= self._most

    def _add_arguments(self, text: str) -> None:
        if self._counts and text:
            self._parts.append(CallArguments(self._num_calls - 1, text))

    def _no_call(self) -> bool:
        """Go on with content: what was taken for the beginning of a call is none."""
        given, self._given = self._given, ""
        self._emit(given)
        self._state = self._text
        return True

    # ---- the states ----------------------------------------------------------------------------------------

    def _text(self) -> bool:
        """Read content up to the opener. Hold back white space and what may be the beginning of an opener."""
        at = self._buffer.find(self.opener)
        end = at if at >= 0 else len(self._buffer) - partial_length(self._buffer, self.opener)
        kept = len(self._buffer[:end].rstrip())
        self._emit(self._buffer[:kept])
        if at < 0:
            self._buffer = self._buffer[kept:]
            return False
        end += len(self.opener)
        self._given, self._buffer = self._buffer[kept:end], self._buffer[end:]
        self._state = self._between
        return True

    def _between(self) -> bool:
        """Read the white space before a call."""
        self._skip_space()
        if self._buffer.startswith("{"):
            self._scan, self._scanned, self._state = JsonScan(), 0, self._head
            return True
        return bool(self._buffer) and self._no_call()

    def _skip_space(self) -> None:
        rest = self._buffer.lstrip()
        if self._given:
            self._given += self._buffer[: len(self._buffer) - len(rest)]
        self._buffer = rest

    def _head(self) -> bool:
        """Read a call up to its arguments, or a whole call if its name comes last."""
        head = HEAD.match(self._buffer)
        if head is not None:
            if head[1] not in self._tools:
                return self._no_call()
            self._begin(head[1])
            self._buffer = self._buffer[head.end() :]
            self._scan, self._state = JsonScan(), self._arguments
            return True
        if not self.any_order:
            return len(self._buffer) > MAX_HEAD and self._no_call()
        end = self._scan.feed(self._buffer[self._scanned :])
        if end < 0:
            self._scanned = len(self._buffer)
            return False
        end += self._scanned
        call = _whole_call(self._buffer[:end])
        if call is None or call[0] not in self._tools:
            return self._no_call()
        self._begin(call[0])
        self._add_arguments(json.dumps(call[1], ensure_ascii=False))
        self._buffer, self._state = self._buffer[end:], self._after
        return True

    def _arguments(self) -> bool:
        """Read the arguments, an object."""
        end = self._scan.feed(self._buffer)
        piece = self._buffer if end < 0 else self._buffer[:end]
        self._add_arguments(piece)
        self._buffer = self._buffer[len(piece) :]
        if end < 0:
            return False
        self._after_arguments()
        return True

    def _after_arguments(self) -> None:
        self._scan, self._state = JsonScan(1), self._rest

    def _rest(self) -> bool:
        """Read what follows the arguments inside the call, such as an id."""
        end = self._scan.feed(self._buffer)
        self._buffer = "" if end < 0 else self._buffer[end:]
        if end >= 0:
            self._state = self._after
        return end >= 0

    def _after(self) -> bool:
        """Read what follows a call."""
        raise NotImplementedError


def call_frame(name: str, schema: Any, arguments: str = "arguments") -> list[Any]:
    """Return the frame of one call: `{"name": …, "arguments": …}`."""
    return [f'{{"name": {json.dumps(name)}, "{arguments}": ', {"json_schema": schema}, "}"]


def one_or_more(calls: Sequence[Any], most: int | None, separator: str) -> Any:
    """Return the frame of one of ``calls``, or of several with ``separator`` between them if ``most`` is None."""
    frame = {"any_of": list(calls)}
    return frame if most == 1 else {"repeat": frame, "separator": separator}


def _whole_call(text: str) -> tuple[str, dict[str, Any]] | None:
    """Return the name and the arguments of a call, or None if the text is none."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    match call:
        case {"name": str(name), "arguments": dict(arguments)} | {"name": str(name), "parameters": dict(arguments)}:
            return name, arguments
    return None

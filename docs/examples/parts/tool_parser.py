"""`tool_parser=lines`: a call is a line of its own, such as `CALL get_weather {"city": "Rome"}`."""

import json
import uuid
from dataclasses import dataclass

from minisgl import hookimpl
from minisgl.plugins.http.apis.answer import CallArguments, CallBegin, Content


@dataclass
class Lines:
    """Calls as lines that begin with ``CALL``."""

    def build(self):
        return LinesParser()


class LinesParser:
    special = ()  # the special tokens that the reader must see

    def reader(self, tools, most, forced):
        return LinesReader(tools, most)

    def frame(self, tools, most):
        """Return what a forced call looks like: literal texts, and the JSON schemas of the arguments."""
        return {"any_of": [[f"CALL {name} ", {"json_schema": schema}, "\n"] for name, schema in tools]}


class LinesReader:
    """Reads an answer line by line."""

    def __init__(self, tools, most):
        self.tools, self.most, self.line, self.count = tools, most, "", 0

    def feed(self, text):
        *lines, self.line = (self.line + text).splitlines(keepends=True) or [""]
        if self.line.endswith("\n"):
            lines, self.line = [*lines, self.line], ""
        return [part for line in lines for part in self.read(line)]

    def finish(self):
        return self.read(self.line) if self.line else []

    def read(self, line):
        word, name, arguments = [*line.split(maxsplit=2), "", "", ""][:3]
        if word != "CALL" or name not in self.tools or not is_object(arguments):
            return [Content(line)]
        self.count += 1
        if self.most is not None and self.count > self.most:
            return []
        call = self.count - 1
        return [CallBegin(call, f"call_{uuid.uuid4().hex}", name), CallArguments(call, arguments.strip())]


def is_object(text):
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


@hookimpl
def minisgl_configs():
    yield "tool_parser", "lines", Lines

"""`reasoning_parser=final`: what comes before the line `Answer:` is reasoning."""

from dataclasses import dataclass

from minisgl import hookimpl
from minisgl.plugins.http.apis.answer import Reasoning


@dataclass
class Final:
    """Reasoning up to a mark."""

    mark: str = "Answer:"
    """The text between the reasoning and the answer."""

    def build(self):
        return FinalParser(self.mark)


class FinalParser:
    opener = ""

    def __init__(self, mark):
        self.after = mark  # a grammar begins after this text if it is a token, and is refused otherwise

    def is_open(self, prompt):
        return True

    def is_closed(self, prompt):
        return False

    def reader(self, is_open, then):
        return FinalReader(self.after, then)


class FinalReader:
    """Holds the reasoning back until the mark comes."""

    def __init__(self, mark, then):
        self.mark, self.then, self.held = mark, then, ""

    def feed(self, text):
        if self.held is None:
            return self.then.feed(text)
        before, mark, after = (self.held + text).partition(self.mark)
        if not mark:
            self.held = before
            return []
        self.held = None
        return [Reasoning(before), *self.then.feed(after)]

    def finish(self):
        return ([Reasoning(self.held)] if self.held else []) + self.then.finish()


@hookimpl
def minisgl_configs():
    yield "reasoning_parser", "final", Final

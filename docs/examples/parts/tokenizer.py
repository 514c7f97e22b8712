"""`tokenizer=briefed`: each chat begins with a system message, and the client does not see the model's thoughts."""

from dataclasses import dataclass

from minisgl import hookimpl
from minisgl.tokenizer.tokenizer import Tokenizer


@dataclass
class Briefed:
    """Add a system message to each chat, and leave out the text of an answer up to ``</think>``."""

    system: str = "Answer in one sentence."
    """The system message."""

    def build(self, path, parse_special_tokens):
        tokenizer = BriefedTokenizer.read(path, parse_special_tokens)
        if tokenizer is not None:
            tokenizer.system = self.system
        return tokenizer


class BriefedTokenizer(Tokenizer):
    def render(self, messages, add_generation_prompt=True, chat_template_kwargs=None, tools=()):
        if messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system}, *messages]
        return super().render(messages, add_generation_prompt, chat_template_kwargs, tools)

    def stream(self, prompt_tail, params):
        return WithoutThoughts(super().stream(prompt_tail, params))


class WithoutThoughts:
    """A text stream without the text up to ``</think>``, if the text has it."""

    pending = ""

    def __init__(self, stream):
        self.stream, self.text, self.thinks = stream, "", True

    def feed(self, token):
        text = self.stream.feed(token)
        if not self.thinks:
            return text
        self.text += text
        _, end, after = self.text.partition("</think>")
        self.thinks = not end
        return after

    def flush(self):
        return (self.text if self.thinks else "") + self.stream.flush()


@hookimpl
def minisgl_configs():
    yield "tokenizer", "briefed", Briefed

"""`tokenizer=auto`: the tokens, text and prompts of transformers, and refusals of what a chat template would drop."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minisgl.hooks import hookimpl

if TYPE_CHECKING:
    from minisgl.tokenizer.tokenizer import Tokenizer


@dataclass
class Auto:
    """The tokens and prompts of transformers, also for older checkpoints, and no text of a chat is lost.

    A chat is refused if the model's chat template would drop a text or a field of it. The text of a special token stays
    text also where a client's string and the template make it together.
    """

    def build(self, path: Path, parse_special_tokens: bool) -> Tokenizer | None:
        from minisgl.plugins.tokenizer.exact.tokenizer import ExactTokenizer

        return ExactTokenizer.read(path, parse_special_tokens)


@hookimpl
def minisgl_configs() -> Any:
    yield "tokenizer", "auto", Auto

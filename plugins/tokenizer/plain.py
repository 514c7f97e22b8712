"""`tokenizer=plain`: the tokenizer of the core, which takes `tokenizer.json` and the chat template as they are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minisgl.hooks import hookimpl

if TYPE_CHECKING:
    from minisgl.tokenizer.tokenizer import Tokenizer


@dataclass
class Plain:
    """tokenizer.json as it is, and chats without checks: what the chat template drops, the model does not see.

    Messages with the text of a special token are refused, unless they are parsed.
    """

    def build(self, path: Path, parse_special_tokens: bool) -> Tokenizer | None:
        from minisgl.tokenizer.tokenizer import Tokenizer

        return Tokenizer.read(path, parse_special_tokens)


@hookimpl
def minisgl_configs() -> Any:
    yield "tokenizer", "plain", Plain

"""Tokenization, detokenization, chat templates and stop strings.

The package imports neither torch nor transformers. `Tokenizer` and `Detokenizer` are imported at their first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minisgl.tokenizer.detokenizer import Detokenizer
    from minisgl.tokenizer.tokenizer import Tokenizer

__all__ = ["Detokenizer", "Tokenizer"]


def __getattr__(name: str) -> Any:
    if name == "Tokenizer":
        from minisgl.tokenizer.tokenizer import Tokenizer

        return Tokenizer
    if name == "Detokenizer":
        from minisgl.tokenizer.detokenizer import Detokenizer

        return Detokenizer
    raise AttributeError(f"module 'minisgl.tokenizer' has no attribute {name!r}")

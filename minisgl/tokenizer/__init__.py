"""Tokenization, detokenization and chat templates. The package imports neither torch nor transformers."""

from __future__ import annotations

from minisgl.tokenizer.detokenizer import Detokenizer
from minisgl.tokenizer.tokenizer import Tokenizer

__all__ = ["Detokenizer", "Tokenizer"]

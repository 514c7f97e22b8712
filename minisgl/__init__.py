"""minisgl: an LLM serving engine that people take apart to learn how serving works.

Importing it is cheap: the API server and the tokenizer processes import this package and no torch. What
needs torch (``LLM``) is imported when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minisgl.core import SamplingParams
from minisgl.hooks import hookimpl
from minisgl.utils.version import __version__

if TYPE_CHECKING:
    from minisgl.llm import LLM

__all__ = ["LLM", "SamplingParams", "__version__", "hookimpl"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from minisgl.llm import LLM

        return LLM
    raise AttributeError(f"module 'minisgl' has no attribute {name!r}")

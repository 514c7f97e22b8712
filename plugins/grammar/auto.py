"""`grammar=auto`: llguidance where it is installed, otherwise `plain`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minisgl.hooks import hookimpl

if TYPE_CHECKING:
    from minisgl.plugins.grammar.base import Grammars
    from minisgl.tokenizer import Tokenizer


@dataclass
class Auto:
    """The plugin ``llguidance`` if the package of this name is installed, otherwise ``plain``."""

    def build(self, tokenizer: Tokenizer, build_other: Callable[[str], Grammars]) -> Grammars:
        return build_other("llguidance" if importlib.util.find_spec("llguidance") else "plain")


@hookimpl
def minisgl_configs() -> Any:
    yield "grammar", "auto", Auto

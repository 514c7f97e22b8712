"""minisgl: an LLM serving engine for learning how LLM serving works.

Importing this package does not import torch, because the API server and the tokenizer processes import it too. ``LLM``,
which needs torch, is imported at its first use. The import sets the environment variable ``OMP_WAIT_POLICY`` for torch,
unless the user has set it: see `plugins/kernels/openmp.py`.

The folders ``plugins``, ``conf`` and ``chapters`` beside this one are installed as `minisgl.plugins`, `minisgl.conf`
and `minisgl.chapters` (pyproject.toml).
"""

from __future__ import annotations

import contextlib
import importlib
from typing import TYPE_CHECKING, Any

from minisgl.core import SamplingParams
from minisgl.hooks import hookimpl
from minisgl.utils.version import __version__

if TYPE_CHECKING:
    from minisgl.llm import LLM

__all__ = ["LLM", "SamplingParams", "__version__", "hookimpl"]

with contextlib.suppress(ModuleNotFoundError):  # the folder may have been deleted
    importlib.import_module(f"{__name__}.plugins.kernels.openmp")  # sets an environment variable for torch


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from minisgl.llm import llm_class

        return llm_class()
    raise AttributeError(f"module 'minisgl' has no attribute {name!r}")

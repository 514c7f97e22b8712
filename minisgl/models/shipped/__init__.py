"""The embedded model `tutor`: where its weights lie, and everything that made them.

This module only knows the shipped folders, and imports nothing heavy, so that a server can ask for a path.
The corpus is in `corpus` (and the files it names), the vocabulary in `tokenizer`, training in `train`, and the
scores in `score`; run each with `python -m minisgl.tutor.<name>`.
"""

from __future__ import annotations

from pathlib import Path

_WEIGHTS = Path(__file__).resolve().parent / "weights"


def shipped() -> list[str]:
    """The names of the models that ship with minisgl, sorted."""
    return sorted(path.parent.name for path in _WEIGHTS.glob("*/config.json"))


def weights_dir(name: str = "tutor") -> Path:
    """The folder of a shipped model, in Hugging Face format.

    Raises `KeyError`, naming what does ship, for any other name: so a caller can try this first and then treat
    the name as a path or a Hugging Face id.
    """
    path = _WEIGHTS / name
    if "/" in name or "\\" in name or not (path / "config.json").is_file():
        raise KeyError(f"no model named {name!r} ships with minisgl; these do: {', '.join(shipped()) or 'none'}")
    return path

"""The models that ship with minisgl, one folder each in Hugging Face format.

The module imports no torch, so that the API server and the tokenizer processes can use it. The weights were trained by
`minisgl.chapters.tutor.train`.
"""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).resolve().parent


def shipped() -> list[str]:
    """Return the names of the models that ship with minisgl, sorted."""
    return sorted(path.parent.name for path in _FOLDER.glob("*/config.json"))


def weights_dir(name: str = "tutor") -> Path:
    """Return the folder of a model that ships with minisgl, in Hugging Face format.

    Raises `KeyError` that lists the shipped models for any other name. So a caller can try this function first, and
    then treat the name as a path or a Hugging Face id.
    """
    path = _FOLDER / name
    if "/" in name or "\\" in name or not (path / "config.json").is_file():
        models = ", ".join(shipped()) or "none"
        raise KeyError(f"no model named {name!r} ships with minisgl. Models that ship: {models}")
    return path

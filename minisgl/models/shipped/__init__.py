"""The models that ship with minisgl, one folder each in Hugging Face format.

Imports no torch, so that the API server and the tokenizers can ask for a path. The weights were trained by
`minisgl.course.tutor.train`.
"""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).resolve().parent


def shipped() -> list[str]:
    """The names of the models that ship with minisgl, sorted."""
    return sorted(path.parent.name for path in _FOLDER.glob("*/config.json"))


def weights_dir(name: str = "tutor") -> Path:
    """The folder of a shipped model, in Hugging Face format.

    Raises `KeyError`, naming what does ship, for any other name: so a caller can try this first and then treat
    the name as a path or a Hugging Face id.
    """
    path = _FOLDER / name
    if "/" in name or "\\" in name or not (path / "config.json").is_file():
        raise KeyError(f"no model named {name!r} ships with minisgl; these do: {', '.join(shipped()) or 'none'}")
    return path

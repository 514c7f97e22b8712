"""From the ``model`` option to a path: what ships with minisgl, a directory, or the Hugging Face hub and its cache.

Imports no torch, so that the server's processes can ask too.
"""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path

from minisgl.config import ConfigError
from minisgl.models.shipped import shipped, weights_dir

__all__ = ["named_models", "resolve_model"]

_WANTED = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "merges.txt", "*.tiktoken"]
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def named_models() -> dict[str, Path]:
    """The models that ship with minisgl by name: directories with weights (``tutor``), and named shapes, which are
    config files without weights (for ``load=dummy``)."""
    shapes = Path(__file__).resolve().parent / "shapes"
    return {file.stem: file for file in sorted(shapes.glob("*.json"))} | {name: weights_dir(name) for name in shipped()}


def resolve_model(name: str) -> Path:
    """The directory of the model ``name``, or the config file of a named shape.

    Looked for in this order: a directory or a ``.json`` config file; a name that ships with minisgl; the local
    Hugging Face cache; the hub. Raises `ConfigError`.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"model={name}: the directory has no config.json. Name the folder that holds the model.")
        return path.resolve()
    if path.suffix == ".json" and path.is_file():
        return path.resolve()
    ours = named_models()
    if name in ours:
        return ours[name]
    if _HUB_ID.fullmatch(name) and not name.startswith("."):
        return _from_hub(name)
    close = difflib.get_close_matches(name, ours, n=1)
    guess = f" Did you mean {close[0]}?" if close else ""
    raise ConfigError(
        f"model={name}: there is no such directory, and no model of that name ships with minisgl "
        f"({', '.join(ours)}).{guess} A Hugging Face id has the form owner/name."
    )


def _from_hub(name: str) -> Path:
    """The snapshot of a hub id: from the local cache where it is whole there, downloaded otherwise."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError:
        raise ConfigError(
            f"model={name} is neither a directory nor a model that ships with minisgl. To load it from the Hugging "
            "Face hub: pip install huggingface_hub."
        ) from None
    try:
        cached = Path(snapshot_download(name, local_files_only=True))
        if _is_whole(cached):
            return cached
    except (LocalEntryNotFoundError, OSError, ValueError):
        pass
    try:
        path = Path(snapshot_download(name, allow_patterns=_WANTED))
        if _is_whole(path):  # where the hub can't be reached, the download returns what the cache has
            return path
        reason = "the hub can't be reached, or it has no config.json and *.safetensors for it"
    except Exception as error:  # the hub's errors, and those of whichever HTTP library it uses
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    raise ConfigError(
        f"model={name}: there is no directory of that name, the local Hugging Face cache does not have all of it, and "
        f"downloading it failed ({reason}). Check the name, the connection and, for a gated model, HF_TOKEN; or name "
        "a directory."
    )


def _is_whole(path: Path) -> bool:
    """Whether a snapshot has its config and every weight file that it should have."""
    if not (path / "config.json").is_file():
        return False
    index = path / "model.safetensors.index.json"
    if index.is_file():
        return all((path / file).is_file() for file in set(json.loads(index.read_text())["weight_map"].values()))
    return any(path.glob("*.safetensors"))

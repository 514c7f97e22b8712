"""Resolution of the ``model`` option to a path.

The option names a model that ships with minisgl, a directory, or a model on the Hugging Face hub. The module imports no
torch, so that the API server and the tokenizer processes can use it too.
"""

from __future__ import annotations

import difflib
import logging
import re
from pathlib import Path

from minisgl.config import ConfigError
from minisgl.models.shipped import shipped, weights_dir
from minisgl.models.weight_files import NOT_WEIGHTS, weight_files

__all__ = ["named_models", "resolve_model", "warn_of_same_name"]

log = logging.getLogger(__name__)

_HUB_PATTERNS = [
    "*.safetensors",
    "*.safetensors.index.json",
    "*.json",
    "*.jinja",
    "*.model",
    "merges.txt",
    "*.tiktoken",
]
_HUB_IGNORED = ["original/*", *NOT_WEIGHTS]
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def named_models() -> dict[str, Path]:
    """Return the models that ship with minisgl, by name.

    The value is a directory for a model with weights (``tutor``). For a named shape the value is a config file: the
    shape has no weights and is meant for ``load_format=dummy``.
    """
    shapes = Path(__file__).resolve().parent / "shapes"
    return {file.stem: file for file in sorted(shapes.glob("*.json"))} | {name: weights_dir(name) for name in shipped()}


def resolve_model(name: str) -> Path:
    """Return the directory of the model ``name``, or the config file of a named shape.

    ``name`` is tried in this order: as the name of a model that ships with minisgl; as a directory or a ``.json``
    config file; in the local Hugging Face cache; on the Hugging Face hub. So a directory with the name of a shipped
    model needs a path with a slash, such as ``./tutor``. Raises `ConfigError` if none of these has the model.
    """
    path = Path(name).expanduser()
    available = named_models()
    if name in available:
        return available[name]
    if path.is_dir():
        if not (path / "config.json").is_file():
            hint = "Give the directory of a model."
            if (path / "adapter_config.json").is_file():
                hint = "An adapter is no whole model: merge it into its base model (merge_and_unload of PEFT)."
            raise ConfigError(f"model={name}: the directory has no config.json. {hint}")
        return path.resolve()
    if path.suffix == ".json" and path.is_file():
        return path.resolve()
    if _HUB_ID.fullmatch(name) and not name.startswith("."):
        return _from_hub(name)
    close = difflib.get_close_matches(name, available, n=1)
    guess = f" Did you mean {close[0]}?" if close else ""
    raise ConfigError(
        f"model={name}: there is no such directory, and no model of that name ships with minisgl "
        f"({', '.join(available)}).{guess} A Hugging Face id has the form owner/name."
    )


def warn_of_same_name(name: str) -> None:
    """Log a warning if ``name`` is a shipped model, and also a model's directory in the current directory."""
    if name in named_models() and Path(name, "config.json").is_file():
        log.warning("model=%s is the model that ships with minisgl. model=./%s is the directory.", name, name)


def _from_hub(name: str) -> Path:
    """Return the snapshot of a hub id: from the local cache if it is complete there, else downloaded."""
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
        if _is_complete(cached):
            return cached
    except (LocalEntryNotFoundError, OSError, ValueError):
        pass
    try:
        path = Path(snapshot_download(name, allow_patterns=_HUB_PATTERNS, ignore_patterns=_HUB_IGNORED))
        if _is_complete(path):  # without a connection, the download returns the cached snapshot, maybe incomplete
            return path
        reason = "the hub can't be reached, or it has no config.json and *.safetensors for it"
    except Exception as error:  # the hub's own errors, and those of its HTTP library
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    raise ConfigError(
        f"model={name}: there is no directory of that name, the local Hugging Face cache has no complete copy, and "
        f"downloading it failed ({reason}). Check the name, the connection and, for a gated model, HF_TOKEN; or give "
        "a directory."
    )


def _is_complete(path: Path) -> bool:
    """Return whether a snapshot has its config.json and all of its weight files."""
    try:
        return (path / "config.json").is_file() and bool(weight_files(path))
    except ConfigError:
        return False

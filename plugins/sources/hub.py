"""``model=owner/name``: a model of the Hugging Face hub, from the local cache, or else downloaded.

The option names it by its id. A directory of that name is preferred, so this plugin is asked after all others.
"""

from __future__ import annotations

import re
from pathlib import Path

from minisgl.config import ConfigError
from minisgl.hooks import hookimpl
from minisgl.models.resolve import weight_files
from minisgl.plugins.sources.unlisted import NOT_WEIGHTS

PATTERNS = [
    "*.safetensors",
    "*.safetensors.index.json",
    "*.json",
    "*.jinja",
    "*.model",
    "merges.txt",
    "*.tiktoken",
]
"""The files that are downloaded."""
IGNORED = ["original/*", *NOT_WEIGHTS]
_ID = re.compile(r"[\w.-]+/[\w.-]+")


@hookimpl(trylast=True)
def minisgl_find_model(name: str) -> Path | None:
    """Return the snapshot of a hub id: from the local cache if it is complete there, else downloaded."""
    path = Path(name).expanduser()
    is_path = path.is_dir() or (path.suffix == ".json" and path.is_file())
    if is_path or not _ID.fullmatch(name) or name.startswith("."):
        return None
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
        path = Path(snapshot_download(name, allow_patterns=PATTERNS, ignore_patterns=IGNORED))
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

"""The view of a GGUF file: a directory with the files that a Hugging Face checkpoint has beside its weights.

The directory is in the user's cache, under a name that depends on the file's path, size and time of change, and on
`VERSION`. So several processes can make it at once, and a file that was replaced gets another one. It takes a few MB.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

from minisgl.config import ConfigError

__all__ = ["view_of"]

VERSION = 1
"""Changes when the content of views changes."""


def cache_dir() -> Path:
    """Return the directory of all views: below ``XDG_CACHE_HOME``, or below ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minisgl" / "gguf"


def view_of(file: Path) -> Path:
    """Return the view of ``file``, which is made unless it exists. ``file`` is an absolute path.

    Raises `ConfigError` that names ``file`` if it can't be served, or if the cache can't be written.
    """
    try:
        stat = file.stat()
    except OSError as error:
        raise ConfigError(f"{file} can't be read: {error.strerror}.") from None
    key = f"{VERSION} {file} {stat.st_size} {stat.st_mtime_ns}"
    view = cache_dir() / f"{file.stem[:80]}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    if (view / "config.json").is_file():
        return view
    files = _contents(file)
    try:
        view.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=".making-", dir=view.parent))
        try:
            for name, text in files.items():
                (made / name).write_text(text, encoding="utf-8")
            try:
                made.rename(view)
            except OSError:
                if not (view / "config.json").is_file():  # else another process was faster
                    raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        raise ConfigError(
            f"{file}: the cache directory {view.parent} can't be written: {error.strerror}. Set XDG_CACHE_HOME to "
            "another one."
        ) from None
    return view


def _contents(file: Path) -> dict[str, str]:
    """Return the texts of the view's files by name."""
    from minisgl.plugins.quantization.ggml.config import config_of
    from minisgl.plugins.quantization.ggml.header import read_header
    from minisgl.plugins.quantization.ggml.vocabulary import read_vocabulary

    header = read_header(file)
    try:
        config = config_of(header)
        vocabulary = read_vocabulary(header.metadata, config["vocab_size"])
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    config["quantization_config"] = {"quant_method": "gguf", "file": str(file)}
    files: dict[str, str] = {}
    if vocabulary is not None:
        config |= {"bos_token_id": vocabulary.bos_id, "eos_token_id": vocabulary.eos_ids or None}
        files["tokenizer.json"] = vocabulary.tokenizer.to_str()
        files["tokenizer_config.json"] = json.dumps(vocabulary.config, indent=2, ensure_ascii=False)
    return files | {"config.json": json.dumps(config, indent=2)}

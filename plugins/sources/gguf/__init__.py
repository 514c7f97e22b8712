"""``model=FILE.gguf``: a model in the single file that llama.cpp uses. Or the directory that holds one such file.

`.header` reads the file's metadata, `.config` and `.vocabulary` turn it into the files of a Hugging Face checkpoint,
and `.view` writes these into a cache directory, once for each file. So the rest of minisgl reads a checkpoint as
always. Only the weights stay in the GGUF file: the config.json of the view names it, and
``quantization=gguf`` (`minisgl.plugins.quantization.gguf`) reads them.
"""

from __future__ import annotations

from pathlib import Path

from minisgl.config import ConfigError
from minisgl.hooks import hookimpl


@hookimpl
def minisgl_find_model(name: str) -> Path | None:
    """Return the view of a GGUF file, or of the only one in a directory without config.json."""
    path = Path(name).expanduser()
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if not files or (path / "config.json").is_file():
            return None
        if len(files) > 1:
            raise ConfigError(
                f"model={name}: the directory has {len(files)} GGUF files. Name one of them: model={files[0]}"
            )
        path = files[0]
    if path.suffix.lower() != ".gguf":
        return None
    if not path.is_file():
        raise ConfigError(f"model={name}: there is no such file.")
    from minisgl.plugins.sources.gguf.view import view_of

    return view_of(path.resolve())

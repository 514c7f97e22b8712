"""``model=FILE.gguf``: a model in the single file that llama.cpp uses. Or the directory that holds one such file.

`minisgl.plugins.quantization.ggml.view` makes the files of a Hugging Face checkpoint of the file's metadata. Their
config.json selects ``quantization=gguf``, which reads the weights. The options of that part are in another module,
because all processes load this one.
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
    from minisgl.plugins.quantization.ggml.view import view_of

    return view_of(path.resolve())

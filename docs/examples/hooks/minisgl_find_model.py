"""Give the directories of models short names: ``model=@NAME`` is the directory NAME below ``MODELS``."""

import os
from pathlib import Path

from minisgl import hookimpl
from minisgl.config import ConfigError


@hookimpl
def minisgl_find_model(name):
    if not name.startswith("@"):
        return None
    path = Path(os.environ["MODELS"], name[1:])
    if not path.is_dir():
        raise ConfigError(f"model={name}: there is no directory {path}")
    return path

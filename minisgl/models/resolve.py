"""Resolution of the ``model`` option to a path, and of a model's directory to the safetensors files of its weights.

The option names a model that ships with minisgl, a directory, or what a plugin finds, such as a model on the Hugging
Face hub (`plugins/sources`). The choice of files is that of transformers. The module imports no torch, so that the API
server and the tokenizer processes can use it too.
"""

from __future__ import annotations

import difflib
import functools
import logging
import os
from collections.abc import Iterable
from pathlib import Path

from minisgl.config import ConfigError
from minisgl.models.shipped import shipped, weights_dir
from minisgl.plugin_manager.discovery import exists, import_module
from minisgl.plugin_manager.manager import PluginManager
from minisgl.utils.json_file import read_json, read_json_if_present

__all__ = ["named_models", "resolve_model", "some", "warn_of_same_name", "weight_files"]

log = logging.getLogger(__name__)

HUB = "minisgl.plugins.sources.hub"
"""The plugin that finds the models of the Hugging Face hub."""
UNLISTED = "minisgl.plugins.sources.unlisted"
"""The plugin that chooses among files that no index lists."""


def named_models() -> dict[str, Path]:
    """Return the models that ship with minisgl, by name.

    The value is a directory for a model with weights (``tutor``). For a named shape the value is a config file: the
    shape has no weights and is meant for ``load_format=dummy``.
    """
    shapes = Path(__file__).resolve().parent / "shapes"
    return {file.stem: file for file in sorted(shapes.glob("*.json"))} | {name: weights_dir(name) for name in shipped()}


def resolve_model(name: str) -> Path:
    """Return the directory of the model ``name``, or the config file of a named shape.

    ``name`` is tried in this order: as the name of a model that ships with minisgl; by the plugins that implement
    `minisgl_find_model`; as a directory or a ``.json`` config file. So a directory with the name of a shipped model
    needs a path with a slash, such as ``./tutor``. Raises `ConfigError` if none of these has the model.
    """
    path = Path(name).expanduser()
    available = named_models()
    if name in available:
        return available[name]
    found: Path | None = _finders().hook.minisgl_find_model(name=name)
    if found is not None:
        return found if found.is_dir() else resolve_model(str(found))
    if path.is_dir():
        if not (path / "config.json").is_file():
            hint = "Give the directory of a model."
            if (path / "adapter_config.json").is_file():
                hint = "An adapter is no whole model: merge it into its base model (merge_and_unload of PEFT)."
            raise ConfigError(f"model={name}: the directory has no config.json. {hint}")
        return path.resolve()
    if path.suffix == ".json" and path.is_file():
        return path.resolve()
    close = difflib.get_close_matches(name, available, n=1)
    guess = f" Did you mean {close[0]}?" if close else ""
    missing = "" if exists(HUB) else ", and needs the plugin plugins/sources/hub, which is missing"
    raise ConfigError(
        f"model={name}: there is no such directory, and no model of that name ships with minisgl "
        f"({', '.join(available)}).{guess} A Hugging Face id has the form owner/name{missing}."
    )


@functools.cache
def _finders() -> PluginManager:
    """Return a manager with the plugins that find models. A process resolves its model several times."""
    manager = PluginManager.load(light=True)
    for kind in ("sources", "quantization.sources"):
        manager.load_all(kind)
    return manager


def warn_of_same_name(name: str) -> None:
    """Log a warning if ``name`` is a shipped model, and also a model's directory in the current directory."""
    if name in named_models() and Path(name, "config.json").is_file():
        log.warning("model=%s is the model that ships with minisgl. model=./%s is the directory.", name, name)


def weight_files(path: Path) -> dict[Path, frozenset[str] | None]:
    """Return each file to load with the tensors that an index lists for it, or None without an index.

    The first of these that exists is chosen, as in transformers: the file or index that ``transformers_weights`` of
    config.json names; ``model.safetensors``; ``model.safetensors.index.json``. If there is none of these,
    `minisgl.plugins.sources.unlisted` chooses. Raises `ConfigError` if a file is missing or there is none.
    """
    if not path.is_dir():
        raise ConfigError(
            f"{path} is not a directory with weights. A named shape has no weights: use load_format=dummy."
        )
    if (path / "adapter_config.json").is_file():
        log.warning("%s has an adapter, which is not applied: only the model's own weights are loaded", path)
    named = read_json_if_present(path / "config.json").get("transformers_weights")
    if named is not None:
        file = path / str(named)
        if not Path(os.path.abspath(file)).is_relative_to(os.path.abspath(path)):
            raise ConfigError(f"{path}/config.json: transformers_weights={named!r} is outside of the directory.")
        if not file.is_file():
            raise ConfigError(f"{path} lacks the file that transformers_weights of its config.json names: {named}.")
        return _indexed(file) if file.suffix == ".json" else {file: None}
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.is_file():
        if index.is_file():
            log.warning("%s is ignored, because model.safetensors is beside it", index)
        return {single: None}
    if index.is_file():
        return _indexed(index)
    if exists(UNLISTED):
        return dict.fromkeys(import_module(UNLISTED, UNLISTED).unlisted(path))
    raise ConfigError(f"{path} has neither model.safetensors nor {index.name}. Other files need {UNLISTED}.")


def some(names: Iterable[str], max_names: int = 5) -> str:
    """Format at most ``max_names`` of ``names`` for a message, and the number of those left out."""
    names = sorted(names)
    more = f" and {len(names) - max_names} more" if len(names) > max_names else ""
    return ", ".join(names[:max_names]) + more


def _indexed(index: Path) -> dict[Path, frozenset[str] | None]:
    """Return the files of an index with their tensors."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ConfigError(f"{index} has no weight_map from the names of tensors to files: download it again.")
    listed: dict[Path, set[str]] = {}
    for name, file in weight_map.items():
        listed.setdefault(index.parent / file, set()).add(name)
    missing = [file.name for file in listed if not file.is_file()]
    if missing:
        raise ConfigError(f"{index.parent} lacks files that its index names: {some(missing)}.")
    if not listed:
        raise ConfigError(f"{index} lists no tensor: download it again.")
    return {file: frozenset(names) for file, names in listed.items()}

"""The files with weights in a directory that has neither ``model.safetensors`` nor its index.

A download that was cut off, an adapter and weights in another format are refused, each with what to do.
"""

from __future__ import annotations

import re
from pathlib import Path

from minisgl.config import ConfigError
from minisgl.models.resolve import some

__all__ = ["NOT_WEIGHTS", "unlisted"]

NOT_WEIGHTS = ("consolidated*.safetensors", "adapter_*.safetensors", "value_head*.safetensors")
"""Patterns of files beside the weights: Mistral's own format, adapters (LoRA), and value heads of reward models."""
_SHARD = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")
_CONVERT = (
    "Convert them: AutoModelForCausalLM.from_pretrained({path!r}).save_pretrained({path!r}) of transformers writes "
    "safetensors files"
)
_OTHER_FORMATS = {
    "pytorch_model*.bin": _CONVERT,
    "*.gguf": _CONVERT.replace("{path!r})", "{path!r}, gguf_file=…)", 1),
    "*.pth": "Convert them with transformers' script for this model",
    "consolidated*.safetensors": "These are in Mistral's own format. Download the repository's model*.safetensors",
    "adapter_*": "An adapter is no whole model. Merge it into its base model (merge_and_unload of PEFT), and save that",
}


def unlisted(path: Path) -> list[Path]:
    """Return all safetensors files of a directory except `NOT_WEIGHTS`.

    Raise `ConfigError` if there are none, or if a part of a set of files or the target of a link is missing.
    """
    files = [file for file in sorted(path.glob("*.safetensors")) if not any(map(file.match, NOT_WEIGHTS))]
    broken = [file.name for file in files if not file.is_file()]
    if broken:
        raise ConfigError(f"{path} has links to files that do not exist: {some(broken)}. Download the model again.")
    parts = [found for file in files if (found := _SHARD.fullmatch(file.name))]
    for stem, total in {(found[1], found[3]) for found in parts}:
        here = {int(found[2]) for found in parts if (found[1], found[3]) == (stem, total)}
        missing = set(range(1, int(total) + 1)) - here
        if missing:
            names = [f"{stem}-{number:0{len(total)}}-of-{total}.safetensors" for number in missing]
            raise ConfigError(f"{path} has a part of a set of files: it lacks {some(names)}.")
    if files:
        return files
    for pattern, advice in _OTHER_FORMATS.items():
        if others := [file.name for file in path.glob(pattern)]:
            raise ConfigError(
                f"{path} has no *.safetensors file with the model's weights, only {some(others)}. "
                f"{advice.format(path=str(path))}."
            )
    raise ConfigError(f"{path} has no *.safetensors file. Download the weights, or use load_format=dummy.")

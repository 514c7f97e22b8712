"""The text part of multimodal checkpoints, for models of this folder that are served without their vision tower."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from minisgl.config import ConfigError
from minisgl.hooks import hookimpl
from minisgl.layers.weight_shards import WeightShard, WeightSource

_LANGUAGE = ("language_model.model.", "model.language_model.")
"""What precedes the names of the text part's tensors: as published, and by transformers 5."""
_NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
"""Where multimodal models put the configuration of their language model."""
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
)
_VISION = tuple(
    f"{base}{name}." for base in ("", "model.") for name in ("vision_tower", "multi_modal_projector", "visual")
)


def text_config(raw: Mapping[str, Any], name: str, *, tied: bool) -> dict[str, Any]:
    """Return a multimodal model's config.json with its text part at the top level, where the core reads it.

    ``name`` is the architecture. ``tied`` says whether the embeddings are tied if the file does not. Raises
    `ConfigError` if there is no text part.
    """
    text = raw.get("text_config")
    if not isinstance(text, dict):
        raise ConfigError(f"text_config of a {name} must be an object, got {text!r}.")
    shared = {key: raw[key] for key in ("dtype", "torch_dtype", "quantization_config") if key in raw}
    tied = raw.get("tie_word_embeddings", text.get("tie_word_embeddings", tied))
    return {**shared, **text, "architectures": [name], "tie_word_embeddings": tied}


@hookimpl(trylast=True)
def minisgl_read_config(raw: Mapping[str, Any]) -> None:
    """Refuse a multimodal model whose text part no other plugin reads."""
    nested = [key for key in _NESTED if isinstance(raw.get(key), dict)]
    if nested and any(raw.get(size) is None for size in _SIZES):
        name = (raw.get("architectures") or ["model"])[0]
        raise ConfigError(
            f"A {name} nests the sizes of its language model in {nested[0]}, as multimodal models do. It can't be "
            "served: use a checkpoint of the language model alone, whose config.json has the sizes at the top level."
        )


class TextPart:
    """The tensors of a multimodal checkpoint's text part, under the names that they have in a text-only checkpoint."""

    def __init__(self, source: WeightSource):
        self.source, self.stored = source, {}
        for name in source.names or ():
            prefix = next((prefix for prefix in _LANGUAGE if name.startswith(prefix)), "")
            if not name.startswith(_VISION):
                text = f"model.{name.removeprefix(prefix)}" if prefix else name.removeprefix("language_model.")
                self.stored[text] = name

    @property
    def names(self) -> frozenset[str] | None:
        """The names of the text part's tensors; None: the source has any tensor."""
        return None if self.source.names is None else frozenset(self.stored)

    def fill(self, shard: WeightShard) -> None:
        """Fill the shard from the tensor that the checkpoint has under its own name."""
        self.source.fill(replace(shard, name=self.stored.get(shard.name, shard.name)))

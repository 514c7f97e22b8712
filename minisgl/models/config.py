"""The contents of a decoder's config.json as one dataclass. Field names are Hugging Face's.

The module reads the layout of transformers 5 (``rope_parameters``, ``dtype``) and older layouts (``rope_theta``,
``rope_scaling``, ``torch_dtype``). Fields that only one architecture uses stay in ``raw``, for the architecture's
plugin. Configurations that are known not to work are refused, for example an unknown RoPE type or an unknown kind of
quantisation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from minisgl.config import ConfigError
from minisgl.layers.rope import RopeConfig
from minisgl.quantization.stored import StoredFp8, stored_fp8
from minisgl.utils.json_file import read_json

__all__ = ["ModelConfig"]

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class ModelConfig:
    """The configuration of a decoder. Sizes are those of the whole model, before it is split over ranks.

    ``raw`` is the whole content of config.json.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    sliding_window: int | None = None
    num_experts: int = 0  # 0: a dense model
    dtype: str = "float32"
    fp8: StoredFp8 | None = None  # how weights are stored in FP8; None: the checkpoint has none
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def max_len(self) -> int:
        """The longest sequence that the model supports, in tokens.

        It is ``max_position_embeddings``, unless YaRN scaling extends the context further.
        """
        if self.rope.rope_type != "yarn":
            return self.max_position_embeddings
        stretched = int(self.rope.original_max_position_embeddings * self.rope.factor)
        return max(self.max_position_embeddings, stretched)

    def need(self, key: str) -> int:
        """Return the positive integer ``key`` of config.json, which not every architecture has.

        Raises `ConfigError` that names ``key`` if it is missing or is not a positive integer.
        """
        return _positive(self.raw, key)

    def window(self, index: int) -> int:
        """Return the sliding window of layer ``index`` in positions, or -1 if the layer has full attention.

        ``layer_types`` or ``max_window_layers`` of config.json says which layers have the window.
        """
        if self.sliding_window is None:
            return -1
        types = self.raw.get("layer_types")
        windowed = types[index] == "sliding_attention" if types else index >= self.raw.get("max_window_layers", 0)
        return self.sliding_window if windowed else -1

    @staticmethod
    def from_dir(path: str | Path) -> ModelConfig:
        """Read the configuration from a model's directory or from a config file. Raises `ConfigError`."""
        path = Path(path)
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            raise ConfigError(f"{path} has no config.json: name the directory that holds the model.")
        try:
            return ModelConfig.from_dict(read_json(file))
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from None

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> ModelConfig:
        """Build the configuration from the content of config.json. Raises `ConfigError` that names the wrong field."""
        architectures = raw.get("architectures") or []
        if len(architectures) != 1:
            raise ConfigError(f"architectures must name one model class, got {architectures!r}.")
        heads = _positive(raw, "num_attention_heads")
        hidden = _positive(raw, "hidden_size")
        kv_heads = _positive({"num_key_value_heads": heads, **raw}, "num_key_value_heads")
        if heads % kv_heads:
            raise ConfigError(f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads}).")
        experts = raw.get("num_experts", raw.get("num_local_experts")) or 0
        uses_window = raw.get("use_sliding_window", True)
        return ModelConfig(
            architecture=architectures[0],
            vocab_size=_positive(raw, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_positive(raw, "intermediate_size"),
            num_hidden_layers=_positive(raw, "num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=raw.get("head_dim") or hidden // heads,
            max_position_embeddings=_positive(raw, "max_position_embeddings"),
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            hidden_act=raw.get("hidden_act", "silu"),
            rope=_rope(raw),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            attention_bias=bool(raw.get("attention_bias", False)),
            sliding_window=raw.get("sliding_window") if uses_window else None,
            num_experts=experts,
            dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."),
            fp8=stored_fp8(raw.get("quantization_config"), experts),
            raw=dict(raw),
        )


def _positive(raw: Mapping[str, Any], key: str) -> int:
    """Return ``raw[key]``. Raises `ConfigError` if it is not a positive integer."""
    value = raw.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{key} must be a positive integer, got {value!r}.")
    return value


def _rope(raw: Mapping[str, Any]) -> RopeConfig:
    """Return the RoPE parameters of config.json. Raises `ConfigError` for kinds that are not supported.

    transformers 5 writes ``rope_parameters``; older versions write ``rope_theta`` and ``rope_scaling``.
    """
    given = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    if any(isinstance(value, dict) for value in given.values()):
        raise ConfigError("rope_parameters differ by layer type, which is not supported.")
    given["rope_type"] = given.get("rope_type") or given.get("type") or "default"
    if given["rope_type"] not in _ROPE_TYPES:
        raise ConfigError(f"rope_type {given['rope_type']!r} is not supported: only {', '.join(_ROPE_TYPES)} are.")
    if (given.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ConfigError("partial_rotary_factor is not supported: every dimension of a head must be rotated.")
    given.setdefault("rope_theta", raw.get("rope_theta"))
    length = raw["max_position_embeddings"]
    original = raw.get("original_max_position_embeddings") or given.get("original_max_position_embeddings") or length
    given["original_max_position_embeddings"] = original
    if given["rope_type"] != "default" and given.get("factor") is None:
        given["factor"] = length / original
    known = {f.name for f in fields(RopeConfig)}
    return RopeConfig(**{key: value for key, value in given.items() if key in known and value is not None})

"""The contents of a decoder's config.json as one dataclass. Field names are Hugging Face's.

The module reads the layout of transformers 5 (``rope_parameters``, ``dtype``) and older layouts (``rope_theta``,
``rope_scaling``, ``torch_dtype``). Fields that only one architecture uses stay in ``raw``, for the architecture's
plugin. Fields of a wrong type are refused here. What only some architectures can compute, for example a RoPE type, is
refused when the model is built (`minisgl.models.decoder`), so that a plugin may support it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from minisgl.config import ConfigError
from minisgl.layers.attention import ROPE_TYPES, RopeConfig
from minisgl.utils.json_file import read_json

__all__ = ["HOW_TO_ADD", "ModelConfig"]

HOW_TO_ADD = (
    'To serve another architecture, name a plugin that implements it with plugins=FILE: the page "Add a model" '
    "(docs/add-a-model.md) shows how to write one."
)


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
    rope: RopeConfig = field(default_factory=RopeConfig)  # type "per_layer_type" if the layer types differ
    rope_by_layer_type: Mapping[str, RopeConfig] = field(default_factory=dict)  # empty: config.json has one for all
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    sliding_window: int | None = None
    num_experts: int = 0  # 0: a dense model
    dtype: str = "float32"
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def max_len(self) -> int:
        """The longest sequence that the model supports, in tokens: ``max_position_embeddings``, or as RoPE allows."""
        return self.rope.max_len(self.max_position_embeddings)

    def need(self, key: str) -> int:
        """Return the positive integer ``key`` of config.json, which not every architecture has.

        Raises `ConfigError` that names ``key`` if it is missing or is not a positive integer.
        """
        return positive(self.raw, key)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return the field ``key`` of config.json, or ``default``. Raises `ConfigError` if it is not true or false."""
        return flag(self.raw, key, default)

    def window(self, index: int) -> int:
        """Return the sliding window of layer ``index`` in positions, or -1 if the layer has full attention.

        ``layer_types`` or ``max_window_layers`` of config.json says which layers have the window. Raises `ConfigError`
        if the layer is of another type, or if it has a window of unknown size.
        """
        kind = self.layer_type(index)
        if kind == "sliding_attention" and self.sliding_window is None:
            raise ConfigError(f"layer_types gives layer {index} a sliding window, but config.json has no window.")
        if self.sliding_window is None or kind == "full_attention":
            return -1
        return self.sliding_window if kind or index >= number(self.raw, "max_window_layers", 0) else -1

    def layer_type(self, index: int) -> str | None:
        """Return "full_attention" or "sliding_attention", as ``layer_types`` has it, or None if it is not given.

        Raises `ConfigError` if the layer is of another type, or if ``layer_types`` has not one entry for each layer.
        """
        types = self.raw.get("layer_types")
        if types is None:
            return None
        if not isinstance(types, list) or len(types) != self.num_hidden_layers:
            raise ConfigError(f"layer_types must have one entry for each of the {self.num_hidden_layers} layers.")
        kind = types[index]
        if kind not in ("full_attention", "sliding_attention"):
            raise ConfigError(f"layer_types has {kind!r}: only full_attention and sliding_attention are known.")
        return str(kind)

    def with_defaults(self, defaults: Mapping[str, Any]) -> ModelConfig:
        """Return the configuration with ``defaults`` for the fields that config.json lacks. Raises `ConfigError`.

        A field that is null is not missing. Fields of this object that ``defaults`` does not concern are kept.
        """
        missing = {key: value for key, value in defaults.items() if key not in self.raw}
        if not missing or not self.raw:
            return self
        old, new = ModelConfig.from_dict(self.raw), ModelConfig.from_dict({**self.raw, **missing})
        changed = {f.name for f in fields(new) if getattr(new, f.name) != getattr(old, f.name)}
        return replace(self, **{name: getattr(new, name) for name in changed})

    @staticmethod
    def from_dir(path: str | Path, layout: Callable[..., Mapping[str, Any] | None] = lambda raw: None) -> ModelConfig:
        """Read the configuration from a model's directory or from a config file. Raises `ConfigError`.

        ``layout`` is the hook `minisgl_read_config`, which may change the layout of config.json.
        """
        path = Path(path)
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            raise ConfigError(f"{path} has no config.json: name the directory that holds the model.")
        try:
            raw = read_json(file)
            return ModelConfig.from_dict(layout(raw=raw) or raw)
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from None

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> ModelConfig:
        """Build the configuration from the content of config.json. Raises `ConfigError` that names the wrong field."""
        architectures = raw.get("architectures") or []
        if len(architectures) != 1:
            raise ConfigError(f"architectures must name one model class, got {architectures!r}.")
        heads = positive(raw, "num_attention_heads")
        hidden = positive(raw, "hidden_size")
        kv_heads = heads if raw.get("num_key_value_heads") is None else positive(raw, "num_key_value_heads")
        if heads % kv_heads:
            raise ConfigError(f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads}).")
        experts = raw.get("num_local_experts", raw.get("num_experts")) or 0
        has_window = flag(raw, "use_sliding_window", True) and raw.get("sliding_window") is not None
        length = positive(raw, "max_position_embeddings")
        rope, rope_by_layer_type = _ropes(raw, length)
        return ModelConfig(
            architecture=architectures[0],
            vocab_size=positive(raw, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=positive(raw, "intermediate_size"),
            num_hidden_layers=positive(raw, "num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=hidden // heads if raw.get("head_dim") is None else positive(raw, "head_dim"),
            max_position_embeddings=length,
            rms_norm_eps=number(raw, "rms_norm_eps", 1e-6),
            hidden_act=raw.get("hidden_act", "silu"),
            rope=rope,
            rope_by_layer_type=rope_by_layer_type,
            tie_word_embeddings=flag(raw, "tie_word_embeddings", False),
            attention_bias=flag(raw, "attention_bias", False),
            sliding_window=positive(raw, "sliding_window") if has_window else None,
            num_experts=experts,
            dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."),
            raw=dict(raw),
        )


def _ropes(raw: Mapping[str, Any], length: int) -> tuple[RopeConfig, dict[str, RopeConfig]]:
    """Return the RoPE parameters of all layers, and those of each layer type if config.json has them by layer type.

    transformers 5 writes ``rope_parameters``; older versions write ``rope_theta`` and ``rope_scaling``, which replaces
    ``rope_parameters`` if a file has both. ``length`` is ``max_position_embeddings``.
    """
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise ConfigError(f"rope_scaling or rope_parameters must be an object, got {given!r}.")
    if not any(isinstance(value, dict) for value in given.values()):
        return _rope(raw, given, length), {}
    by_type = {name: _rope(raw, value, length) for name, value in given.items() if isinstance(value, dict)}
    first, *others = by_type.values()
    return first if all(rope == first for rope in others) else RopeConfig("per_layer_type"), by_type


def _rope(raw: Mapping[str, Any], given: Mapping[str, Any], length: int) -> RopeConfig:
    """Return the RoPE parameters ``given``, with the defaults of transformers for those that are missing.

    ``rope_theta`` and ``partial_rotary_factor`` may also be at the top level of config.json. Its
    ``original_max_position_embeddings`` at the top level replaces the parameter, as in Phi-3. Raises `ConfigError` if a
    parameter has a wrong type, or is missing and has no default.
    """
    top = {key: raw[key] for key in ("rope_theta", "partial_rotary_factor") if key in raw}
    top = {key: value for key, value in top.items() if key == "rope_theta" or value is not None}
    rope = {"original_max_position_embeddings": length, **top, **given}
    if "original_max_position_embeddings" in raw:
        rope["original_max_position_embeddings"] = raw["original_max_position_embeddings"]
    kind = rope["rope_type"] = str(rope.get("rope_type", rope.get("type", "default")))
    if kind in ROPE_TYPES:
        return ROPE_TYPES[kind](rope, length)
    values = {name: number(rope, name, 0.0) for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    return RopeConfig(kind, **values)


def positive(raw: Mapping[str, Any], key: str) -> int:
    """Return ``raw[key]``. Raises `ConfigError` if it is missing or is not a positive integer."""
    value = raw.get(key)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    problem = f"{key} must be a positive integer, got {value!r}"
    if value is not None:
        raise ConfigError(f"{problem}.")
    name = (raw.get("architectures") or ["model"])[0]
    raise ConfigError(
        f"{problem}: the config.json of this {name} lacks the field. minisgl serves decoders whose sizes have Llama's "
        "names."
    )


def number(raw: Mapping[str, Any], key: str, default: float) -> float:
    """Return ``raw[key]``, or ``default`` if it is missing. Raises `ConfigError` if it is not a number."""
    value = raw.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{key} must be a number, got {value!r}.")
    return value


def flag(raw: Mapping[str, Any], key: str, default: bool) -> bool:
    """Return ``raw[key]``, or ``default`` if it is missing. Raises `ConfigError` if it is neither true nor false."""
    value = raw.get(key, default)
    if not isinstance(value, bool):
        raise ConfigError(f"{key} must be true or false, got {value!r}.")
    return value

"""Fields of config.json that change what a model computes, and that only some architectures know.

A checkpoint of one architecture may have the same tensors as another one, and still need another computation: Granite
is Llama with four more factors. So a config.json of another type than the ``model_type`` that a model class declares
(`minisgl.models.decoder.Decoder`), or with one of these fields, is refused.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Container
from typing import TYPE_CHECKING, Any

from minisgl.config import ConfigError
from minisgl.hooks import hookimpl

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig


def _is(*neutral: Any) -> Callable[[Any], bool]:
    return lambda value: value in neutral


def _all_are(neutral: Any) -> Callable[[Any], bool]:
    return lambda values: isinstance(values, list) and bool(values) and all(value == neutral for value in values)


_NEUTRAL: dict[str, Callable[[Any], bool]] = {
    "add_cross_attention": _is(),
    "alibi": _is(),
    "attention_chunk_size": _is(),
    "attention_in_multiplier": _is(1),
    "attention_multiplier": _is(),
    "attention_out_multiplier": _is(1),
    "attention_value_scale": _is(1),
    "attn_logit_softcapping": _is(0),
    "attn_temperature_tuning": _is(0),
    "clip_qkv": _is(),
    "embedding_multiplier": _is(1),
    "final_logit_softcapping": _is(0),
    "hidden_activation": _is(),
    "is_causal": _is(True),
    "is_encoder_decoder": _is(),
    "key_multiplier": _is(1),
    "layer_types": _all_are("full_attention"),
    "lm_head_multiplier": _is(1),
    "logit_scale": _is(1),
    "logits_scaling": _is(1),
    "mlp_multipliers": _all_are(1),
    "no_rope_layers": _all_are(1),  # one number a layer: 1 if it has RoPE
    "parallel_attn": _is(),
    "per_layer_config": _is({}),
    "position_embedding_type": _is("rope", "rotary", "absolute"),  # transformers wrote "absolute" for any decoder
    "query_pre_attn_scalar": _is(),
    "residual_multiplier": _is(1),
    "rope_interleave": _is(),
    "rope_interleaved": _is(),
    "rotary_pct": _is(1),
    "routed_scaling_factor": _is(1),
    "scale_depth": _is(),
    "scale_emb": _is(1),
    "scoring_func": _is("softmax"),
    "use_alibi": _is(),
    "use_bidirectional_attention": _is(),
    "use_parallel_residual": _is(),
}
"""Field → whether a value, which is neither null nor false, changes nothing. Sources: the classes of transformers."""
_NEUTRAL_ROPE = {"alpha": _is(1), "llama_4_scaling_beta": _is(0)}
"""The same for RoPE parameters: of HunYuan, and of Ministral 3."""


@hookimpl
def minisgl_check_model(model: type, config: ModelConfig) -> None:
    """Check config.json if the class itself has a ``model_type``, which a subclass does not inherit."""
    model_type = vars(model).get("model_type")
    if model_type is not None:
        check_architecture(config, model_type, getattr(model, "defaults", {}))


def check_architecture(config: ModelConfig, model_type: str, known: Container[str]) -> None:
    """Raise `ConfigError` if config.json is not that of a model of ``model_type``.

    ``known`` are the names of fields that this type computes; with ``rope_parameters``, it computes them by layer type.
    """
    from minisgl.models.config import HOW_TO_ADD

    raw, name = config.raw, config.architecture
    given = raw.get("model_type")
    if given not in (None, model_type):
        raise ConfigError(
            f"config.json has model_type {given!r}, but {name} computes models of type {model_type!r}, and other types "
            f"may need another computation of the same tensors. {HOW_TO_ADD} If both types compute the same, the "
            f"plugin is a subclass of {name} without changes."
        )
    if config.rope_by_layer_type and "rope_parameters" not in known:
        raise ConfigError(f"rope_parameters differ by layer type, which {name} does not support. {HOW_TO_ADD}")
    config.layer_type(0)
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    for fields, table in ((raw, _NEUTRAL), (rope, _NEUTRAL_ROPE)):
        for key, is_neutral in table.items():
            value = fields.get(key)
            harmless = value is None or (value is False and key != "is_causal") or is_neutral(value)
            if key not in known and not harmless:
                raise ConfigError(
                    f"config.json has {key}={reprlib.repr(value)}, which {name} does not compute. {HOW_TO_ADD}"
                )

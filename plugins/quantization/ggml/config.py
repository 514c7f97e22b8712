"""The metadata of a GGUF file as the content of config.json, and its tensors under the names of Hugging Face.

What llama.cpp would compute in another way than minisgl's model class is refused by its key: a file is served as it is
meant, or not at all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from minisgl.config import ConfigError
from minisgl.plugins.quantization.ggml.header import Header, StoredTensor

__all__ = ["GgufTensor", "config_of", "tensors_of"]

_MODELS = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
}
"""``general.architecture`` → the model class and ``model_type``. Mistral's models have the architecture llama."""

_READ = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
    "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "expert_count", "expert_used_count", "expert_feed_forward_length",
}  # fmt: skip
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "vocab_size": (),
    "rope.scaling.finetuned": (),
    "attention.causal": (True,),
    "attention.layer_norm_epsilon": (),
    "attention.sliding_window": (0,),
    "attention.scale": (0.0,),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0.0, 1.0),
    "pooling_type": (0,),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "logit_scale": (0.0, 1.0),
    "rope.scale_linear": (0.0, 1.0),
    "rope.scaling.attn_factor": (0.0, 1.0),
    "tensor_data_layout": ("Meta AI original pth",),
    "use_parallel_residual": (False,),
}
"""Keys that change nothing with one of these values; without a value, with any."""
_MAX_LENGTH, _MAX_LAYERS = 1 << 22, 4096


def config_of(header: Header) -> dict[str, Any]:
    """Return the content of config.json, without the ids of tokens.

    Raises `ConfigError` for an architecture that is not served, for metadata that is missing or not understood, and if
    a tensor is missing, unknown, or of another shape than the metadata implies.
    """
    name = header.metadata.get("general.architecture")
    if name not in _MODELS:
        raise ConfigError(
            f"general.architecture is {name!r}. GGUF files are served of these: {', '.join(_MODELS)} (llama has "
            "Mistral's models too)."
        )
    if header.metadata.get("split.count", 1) > 1:
        raise ConfigError(
            "it is a part of a model that was split into several files. Join them: llama-gguf-split --merge."
        )
    meta = _Metadata(str(name), header.metadata)
    meta.check_keys()
    heads, hidden = meta.size("attention.head_count"), meta.size("embedding_length")
    head_dim = meta.size("attention.key_length", hidden // heads)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise ConfigError("it lacks the tensor token_embd.weight: it is no language model.")
    architecture, model_type = _MODELS[str(name)]
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": meta.size("feed_forward_length", 1 if name == "qwen3moe" else None),
        "num_hidden_layers": meta.size("block_count", most=_MAX_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": meta.size("context_length", most=_MAX_LENGTH),
        "rms_norm_eps": meta.number("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "rope_parameters": _rope(meta, header, head_dim),
        "dtype": _dtype(header),
    }
    for key in ("attention.value_length", "rope.dimension_count"):
        if meta.size(key, head_dim) != head_dim:
            raise ConfigError(
                f"{name}.{key} is {meta.size(key)}, and only the size of a head is supported: {head_dim}."
            )
    if name == "qwen3moe":
        config |= {
            "num_experts": meta.size("expert_count"),
            "num_experts_per_tok": meta.size("expert_used_count"),
            "moe_intermediate_size": meta.size("expert_feed_forward_length"),
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    elif header.metadata.get(f"{name}.expert_count", 0):
        raise ConfigError(f"{name}.expert_count: experts are supported with the architecture qwen3moe only.")
    if name == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    _check_shapes(header, config)
    return config


@dataclass(frozen=True)
class _Metadata:
    """The metadata of one architecture: ``size("block_count")`` is ``llama.block_count`` of a llama."""

    name: str
    raw: Mapping[str, Any]

    def size(self, key: str, default: int | None = None, most: int = 1 << 24) -> int:
        """Return a positive integer. Raises `ConfigError` if it is missing and has no default, or is not one."""
        value = self.raw.get(f"{self.name}.{key}", default)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]  # the same number for each layer
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise ConfigError(f"{self.name}.{key} must be a number from 1 to {most}, got {value!r:.100}.")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive number, with the digits of the float32 that the file has."""
        value = self.raw.get(f"{self.name}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise ConfigError(f"{self.name}.{key} must be a positive number, got {value!r:.100}.")
        return float(str(np.float32(value)))

    def check_keys(self) -> None:
        """Raise `ConfigError` for a key of this architecture that is not understood, or has a value that is not."""
        for key, value in self.raw.items():
            if not key.startswith(f"{self.name}."):
                continue
            own = key.removeprefix(f"{self.name}.")
            if own not in _READ and (own not in _NEUTRAL or (_NEUTRAL[own] and value not in _NEUTRAL[own])):
                raise ConfigError(f"{key} is {value!r:.100}, which is not supported.")


def _rope(meta: _Metadata, header: Header, head_dim: int) -> dict[str, Any]:
    """Return ``rope_parameters``. The tensor rope_freqs has a divisor for each frequency, as for Llama 3.1."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": meta.number("rope.freq_base", 10_000.0)}
    kind = meta.raw.get(f"{meta.name}.rope.scaling.type", "none")
    factors = header.tensors.get("rope_freqs.weight")
    if factors is not None:
        if factors.block.name != "F32" or factors.shape != (head_dim // 2,):
            raise ConfigError(f"the tensor rope_freqs.weight must have {head_dim // 2} numbers of type F32.")
        with header.file.open("rb") as opened:
            opened.seek(factors.begin)
            values = [float(value) for value in np.frombuffer(opened.read(factors.size), "<f4")]
        if kind != "none" or not all(0 < value < 1e30 for value in values):
            raise ConfigError("the tensor rope_freqs.weight has wrong numbers, or rope.scaling.type is set as well.")
        length = meta.size("context_length", most=_MAX_LENGTH)
        return rope | {
            "rope_type": "longrope",
            "short_factor": values,
            "long_factor": values,
            "attention_factor": 1.0,
            "original_max_position_embeddings": length,
            "factor": 1.0,
        }
    if kind == "none":
        return rope
    if kind not in ("linear", "yarn"):
        raise ConfigError(f"{meta.name}.rope.scaling.type is {kind!r:.100}: only none, linear and yarn are supported.")
    rope |= {"rope_type": kind, "factor": meta.number("rope.scaling.factor")}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = meta.size("rope.scaling.original_context_length", most=_MAX_LENGTH)
    return rope


def _dtype(header: Header) -> str:
    """Return the dtype for a GPU: that of the matrices, or bfloat16 if they are quantised."""
    kinds = {tensor.block.name for tensor in header.tensors.values() if len(tensor.shape) > 1}
    return {"F32": "float32", "F16": "float16"}.get(kinds.pop(), "bfloat16") if len(kinds) == 1 else "bfloat16"


# ---- names ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor of a Hugging Face checkpoint is: in ``stored``, or in its matrix number ``expert``.

    ``heads`` is the number of heads whose rows are in the order of llama.cpp's RoPE, or 0: it rotates neighbours, and
    Hugging Face's code rotates the first half of a head with the second half.
    """

    stored: StoredTensor
    shape: tuple[int, ...]
    expert: int = 0
    heads: int = 0


_TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_TOP |= {"output.weight": "lm_head.weight"}
_LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_gate_inp": "mlp.gate",
}  # fmt: skip
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,3})\.([a-z_]+)\.(weight|bias)")


def tensors_of(header: Header) -> dict[str, GgufTensor]:
    """Return the tensors by their names in a Hugging Face checkpoint. Raises `ConfigError` for an unknown one."""
    llama = header.metadata.get("general.architecture") == "llama"
    heads = {"attn_q": header.metadata.get("llama.attention.head_count", 0)}
    heads["attn_k"] = header.metadata.get("llama.attention.head_count_kv", heads["attn_q"])
    found: dict[str, GgufTensor] = {}
    for name, stored in header.tensors.items():
        matched = _BLOCK.fullmatch(name)
        if name in _TOP:
            found[_TOP[name]] = GgufTensor(stored, stored.shape)
        elif matched and matched[2] in _LAYER:
            layer, kind, suffix = matched.groups()
            permuted = heads.get(kind, 0) if llama else 0
            full = f"model.layers.{layer}.{_LAYER[kind]}.{suffix}"
            found[full] = GgufTensor(stored, stored.shape, heads=permuted)
        elif matched and matched[2] in _EXPERTS and len(stored.shape) == 3:
            layer, kind, suffix = matched.groups()
            for expert in range(stored.shape[0]):
                full = f"model.layers.{layer}.mlp.experts.{expert}.{_EXPERTS[kind]}.{suffix}"
                found[full] = GgufTensor(stored, stored.shape[1:], expert)
        elif name != "rope_freqs.weight":
            raise ConfigError(f"it has the tensor {name!r:.100}, which this architecture does not use.")
    return found


def _check_shapes(header: Header, config: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if the tensors are not those of the sizes: before memory is allocated for these sizes."""
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    experts, expert_inner = config.get("num_experts", 0), config.get("moe_intermediate_size", 0)
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (hidden,),
        "ffn_norm.weight": (hidden,),
        "attn_q.weight": (q, hidden),
        "attn_k.weight": (kv, hidden),
        "attn_v.weight": (kv, hidden),
        "attn_output.weight": (hidden, q),
    }
    if experts:
        shapes |= {f"ffn_{name}_exps.weight": (experts, expert_inner, hidden) for name in ("gate", "up")}
        shapes |= {"ffn_gate_inp.weight": (experts, hidden), "ffn_down_exps.weight": (experts, hidden, expert_inner)}
    else:
        shapes |= {"ffn_gate.weight": (inner, hidden), "ffn_up.weight": (inner, hidden)}
        shapes |= {"ffn_down.weight": (hidden, inner)}
    expected: dict[str, tuple[int, ...]] = {"token_embd.weight": (config["vocab_size"], hidden)}
    expected |= {"output_norm.weight": (hidden,)}
    expected |= {} if config["tie_word_embeddings"] else {"output.weight": expected["token_embd.weight"]}
    for layer in range(config["num_hidden_layers"]):
        expected |= {f"blk.{layer}.{name}": shape for name, shape in shapes.items()}
    for name, shape in expected.items():
        if name not in header.tensors:
            raise ConfigError(f"it lacks the tensor {name}.")
        found = header.tensors[name].shape
        if found != shape:
            raise ConfigError(f"the tensor {name} has shape {list(found)}, but the metadata implies {list(shape)}.")
    tensors_of(header)

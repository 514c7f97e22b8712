"""Writes small GGUF files for tests, with the package ``gguf`` of the authors of llama.cpp, from small checkpoints.

Names, types of tokens and the order of the rows of query and key heads are those of llama.cpp's convert_hf_to_gguf.py.
The module uses transformers' files and no code of minisgl's reader.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from minisgl.tokenizer.tokenizer import byte_of_character

__all__ = ["random_gguf", "tiny_gguf"]

_ARCHITECTURES = {"qwen3_moe": "qwen3moe", "mistral": "llama"}
_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
}  # fmt: skip


def tiny_gguf(
    checkpoint: Path,
    file: Path,
    kind: str = "F32",
    *,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Any] | None = None,
) -> Path:
    """Write ``checkpoint``, a result of `minisgl.testing.checkpoints.tiny_checkpoint`, as a GGUF file and return it.

    - ``kind``: the type of the matrices, such as "Q8_0". The K types get random blocks, because the package ``gguf``
      can't make them from numbers. Norms, biases and routers are F32.
    - ``metadata``: more entries, or other values; those that are None are left out.
    - ``tensors``: more tensors, arrays of float32.
    """
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((checkpoint / "config.json").read_text("utf-8"))
    name = _ARCHITECTURES.get(config["model_type"], config["model_type"])
    entries = _metadata(name, config) | _vocabulary(checkpoint, config) | dict(metadata or {})
    writer = gguf.GGUFWriter(file, entries.pop("general.architecture", name))
    for key, value in entries.items():
        _add(writer, key, value)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    stored = gguf.GGMLQuantizationType[kind]
    generator = np.random.default_rng(0)
    for full, tensor in _tensors(load_file(checkpoint / "model.safetensors")).items():
        if name == "llama" and (part := full.split(".")[-2]) in heads:
            tensor = tensor.reshape(heads[part], 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
        if tensor.ndim == 1 or "ffn_gate_inp" in full:
            writer.add_tensor(full, tensor)
        elif kind.endswith("_K"):
            writer.add_tensor(full, _random_blocks(kind, tensor.shape, generator), raw_dtype=stored)
        else:
            writer.add_tensor(full, gguf.quants.quantize(tensor, stored), raw_dtype=stored)
    for full, tensor in (tensors or {}).items():
        writer.add_tensor(full, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def random_gguf(config: Mapping[str, Any], file: Path, kind: str) -> Path:
    """Write a model of the shape ``config``, the content of config.json, with random blocks, and return the file.

    ``kind`` is "Q8_0" or "Q4_0", and ``model_type`` "qwen3". llama.cpp can read the file; the tokens are no words.
    """
    import gguf

    heads, head_dim, hidden = config["num_attention_heads"], config["head_dim"], config["hidden_size"]
    kv, inner, size = config["num_key_value_heads"] * head_dim, config["intermediate_size"], config["vocab_size"]
    writer, generator = gguf.GGUFWriter(file, "qwen3"), np.random.default_rng(0)
    rope = {"rope_type": "default", "rope_theta": config.get("rope_theta", 10_000.0)}
    letters = byte_of_character()
    tokens = [*sorted(letters, key=letters.__getitem__), "!!", *(f"[{i}]" for i in range(257, size))]
    vocabulary = {
        "model": "gpt2", "pre": "qwen2", "tokens": tokens,
        "token_type": [1] * size, "merges": ["! !"], "eos_token_id": size - 1,
    }  # fmt: skip
    entries = _metadata("qwen3", {"rope_parameters": rope, **config})
    for key, value in (entries | {f"tokenizer.ggml.{key}": value for key, value in vocabulary.items()}).items():
        _add(writer, key, value)

    def add(name: str, *shape: int) -> None:
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, np.float32))
            return
        block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
        blocks = generator.integers(0, 256, (shape[0], shape[1] // 32, block), dtype=np.uint8)
        scale = {"Q8_0": 0.02 / 74, "Q4_0": 0.02 / 4.6}[kind]  # numbers with a standard deviation of 0.02
        blocks[:, :, :2] = np.array([scale], np.float16).view(np.uint8)
        writer.add_tensor(name, blocks.reshape(shape[0], -1), raw_dtype=gguf.GGMLQuantizationType[kind])

    add("token_embd.weight", size, hidden)
    add("output_norm.weight", hidden)
    for layer in range(config["num_hidden_layers"]):
        for part, *shape in (
            ("attn_q", heads * head_dim, hidden), ("attn_k", kv, hidden), ("attn_v", kv, hidden),
            ("attn_output", hidden, heads * head_dim), ("ffn_gate", inner, hidden), ("ffn_up", inner, hidden),
            ("ffn_down", hidden, inner), ("attn_norm", hidden), ("ffn_norm", hidden), ("attn_q_norm", head_dim),
            ("attn_k_norm", head_dim),
        ):  # fmt: skip
            add(f"blk.{layer}.{part}.weight", *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _metadata(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    rope = config["rope_parameters"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    entries: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": head_dim,
        "vocab_size": config["vocab_size"],
    }
    if rope["rope_type"] in ("linear", "yarn"):
        entries |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] == "yarn":
        entries["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    experts = config.get("num_local_experts", config.get("num_experts"))
    if experts:
        entries |= {"expert_count": experts, "expert_used_count": config["num_experts_per_tok"]}
        entries["expert_feed_forward_length"] = config["moe_intermediate_size"]
    return {f"{name}.{key}": value for key, value in entries.items()}


def _vocabulary(checkpoint: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    file = checkpoint / "tokenizer.json"
    if not file.is_file():
        return {}
    raw = json.loads(file.read_text("utf-8"))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in raw["model"]["merges"]]
    settings = json.loads((checkpoint / "tokenizer_config.json").read_text("utf-8"))
    added = {token["id"]: token for token in raw["added_tokens"]}
    vocab = raw["model"]["vocab"] | {token["content"]: i for i, token in added.items()}
    by_id = {i: text for text, i in vocab.items()}
    size = config["vocab_size"]
    tokens = [by_id.get(i, f"[PAD{i}]") for i in range(size)]
    kinds = [5 if i not in by_id else 1 if i not in added else 3 if added[i]["special"] else 4 for i in range(size)]
    template = checkpoint / "chat_template.jinja"
    text = template.read_text("utf-8") if template.is_file() else settings.get("chat_template")
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": text,
    }


def _add(writer: Any, key: str, value: Any) -> None:
    """Add an entry with the type that llama.cpp's converter gives it: unsigned integers, floats of 32 bits."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)


def _tensors(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors by their names in a GGUF file, the experts of a layer as one tensor."""
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    found: dict[str, Any] = {}
    experts: dict[str, dict[int, Any]] = {}
    for full, tensor in weights.items():
        name, _, suffix = full.rpartition(".")
        if name in top:
            found[f"{top[name]}.{suffix}"] = tensor
            continue
        layer, _, kind = name.removeprefix("model.layers.").partition(".")
        if ".experts." in kind:
            number, part = kind.split(".")[-2:]
            experts.setdefault(f"blk.{layer}.ffn_{part.removesuffix('_proj')}_exps.{suffix}", {})[int(number)] = tensor
        else:
            found[f"blk.{layer}.{_NAMES[kind]}.{suffix}"] = tensor
    return found | {name: np.stack([each[i] for i in range(len(each))]) for name, each in experts.items()}


def _random_blocks(kind: str, shape: tuple[int, ...], generator: np.random.Generator) -> Any:
    """Return random blocks of Q4_K or Q6_K whose numbers are about as large as those of a layer."""
    size, scales = {"Q4_K": (144, (0, 2)), "Q6_K": (210, (208,))}[kind]
    blocks = generator.integers(0, 256, (*shape[:-1], shape[-1] // 256, size), dtype=np.uint8)
    for at in scales:
        values = generator.uniform(0.5e-4, 2e-4, blocks.shape[:-1]).astype(np.float16)
        blocks[..., at : at + 2] = values[..., None].view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)

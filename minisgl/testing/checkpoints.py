"""Writes small random checkpoints for tests, with transformers, whose logits minisgl's models are compared with.

This module uses transformers, imported when a function is called, and no code of minisgl. All weights, also of norms
and biases, vary more than usual initial weights. So a weight that a model does not load changes the logits by more
than rounding errors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["ARCHITECTURES", "WITH_STATES", "tiny_checkpoint"]

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
}
"""Short name → the architecture's name in config.json."""
WITH_STATES = frozenset({"qwen3_next"})
"""Those of models with a recurrent state, which the pages of a cached prefix and rejected drafts do not fit."""

_SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 32},  # differs from hidden_size / heads, as it does in the published models
    "qwen3_moe": {
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    },
    "smollm3": {"no_rope_layers": [1, 0], "pad_token_id": 0},
    "olmo3": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 9,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 5e5,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "pad_token_id": 0,
    },
    "gemma3": {
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 9,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "pad_token_id": 0,
    },
    "gpt_oss": {
        "head_dim": 32,
        "intermediate_size": 64,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "sliding_window": 9,
        "swiglu_limit": 1.0,  # low, so that many gates are clamped
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1.5e4,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "truncate": False,
        },
    },
    "qwen3_next": {
        "head_dim": 32,
        "num_hidden_layers": 4,
        "full_attention_interval": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    },
}
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
_TEXT = (
    "A page of the pool holds sixteen tokens. A prefix cache keeps the pages of prompts that were computed before. "
    "The scheduler admits, batches, evicts and retracts; the engine computes; the answer streams back.\n"
    "Wer zuerst kommt, mahlt zuerst. Le cache évite le travail déjà fait. 前缀缓存 0123456789 🙂\n"
)


def tiny_checkpoint(
    architecture: str,
    dir: str | Path,  # noqa: A002
    *,
    seed: int = 0,
    tokenizer: bool = False,
    fused_experts: bool = False,
    fp8: bool = False,
    max_shard_size: str = "5GB",
    generation: dict[str, Any] | None = None,
    **overrides: Any,
) -> Path:
    """Write a random checkpoint of ``architecture`` to the directory ``dir`` and return its path.

    - ``architecture``: a key or a value of `ARCHITECTURES`.
    - ``seed``: the weights are float32, and equal for equal seeds and shapes.
    - ``tokenizer``: also write a byte-level BPE tokenizer of at most ``vocab_size`` tokens, whose chat template begins
      with the BOS token (0).
    - ``fused_experts``: keep transformers 5's layout, one tensor for all experts of a layer, not one per expert.
    - ``fp8``: store the projections, also those of experts, in the layout of Qwen3-FP8: e4m3 with a scale, in bfloat16,
      for each 128 × 128 block. The whole checkpoint is then one file.
    - ``max_shard_size``: largest weight file, for example "20KB"; larger
      checkpoints are split into several files with an index.
    - ``generation``: fields of generation_config.json, whose end-of-sequence ids are [1, 2] by default.
    - ``overrides``: fields of transformers' config class. The default model has a vocabulary of 320 tokens, hidden size
      64, 2 layers, 4 query heads and 2 KV heads.

    Raise ValueError for an unknown architecture, or if ``vocab_size`` is too small for the tokenizer.
    """
    names = {long: short for short, long in ARCHITECTURES.items()} | {short: short for short in ARCHITECTURES}
    if architecture not in names:
        choices = ", ".join(sorted(names))
        raise ValueError(f"cannot write a checkpoint of the architecture {architecture!r}: choose one of {choices}")
    import torch
    import transformers

    short = names[architecture]
    path = Path(dir)
    model_class = getattr(transformers, ARCHITECTURES[short])
    config = model_class.config_class(**{**_SHAPE, **_OWN[short], **overrides})
    with torch.random.fork_rng(devices=[]):
        model = model_class(config).to(torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name and short == "qwen3_next" and "linear_attn" not in name:  # it multiplies by 1 + weight
                parameter.copy_(0.2 * noise)
            elif "norm" in name:
                parameter.copy_(1 + 0.2 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.2 * noise)
            elif "embed" in name:
                parameter.copy_(noise)
            else:
                parameter.copy_(1.5 * noise / parameter.shape[-1] ** 0.5)
    was_shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        model.save_pretrained(path, max_shard_size=max_shard_size, save_original_format=not fused_experts)
    finally:
        if was_shown:
            transformers.utils.logging.enable_progress_bar()
    if fp8:
        _store_in_fp8(path)
    defaults = {"bos_token_id": 0, "eos_token_id": [1, 2]}
    (path / "generation_config.json").write_text(json.dumps({**defaults, **(generation or {})}, indent=2) + "\n")
    if tokenizer:
        _write_tokenizer(path, config.vocab_size)
    return path


def _store_in_fp8(path: Path) -> None:
    """Replace each projection of model.safetensors by e4m3 values and the scales of their blocks."""
    import torch
    from safetensors.torch import load_file, save_file

    file = path / "model.safetensors"
    stored = {}
    for name, tensor in load_file(file).items():
        stored[name] = tensor
        if not name.endswith(("_proj.weight", "experts.gate_up_proj", "experts.down_proj")):
            continue
        values, scales = zip(*map(_fp8_blocks, tensor.flatten(0, -3) if tensor.dim() > 2 else [tensor]), strict=True)
        stored[name] = torch.stack(values).view(tensor.shape)
        stored[f"{name}_scale_inv"] = torch.stack(scales).view(*tensor.shape[:-2], *scales[0].shape)
    save_file(stored, file, metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _fp8_blocks(weight: Any) -> tuple[Any, Any]:
    """Return a matrix in e4m3, and the scales of its blocks of 128 × 128 in bfloat16."""
    import torch

    rows, cols = (range(0, size, 128) for size in weight.shape)
    values, scales = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty(len(rows), len(cols))
    for i, row in enumerate(rows):
        for j, col in enumerate(cols):
            block = weight[row : row + 128, col : col + 128]
            scales[i, j] = scale = (block.abs().max() / 448).bfloat16().float()
            values[row : row + 128, col : col + 128] = (block / scale).clamp(-448, 448).to(values.dtype)
    return values, scales.bfloat16()


def _write_tokenizer(path: Path, vocab_size: int) -> None:
    """Write a byte-level BPE tokenizer trained on a few lines of text.

    Token ids: <|bos|> 0, <|eos|> 1, <|end|> 2, <|start|> 3, then bytes and merges.
    """
    import tokenizers
    import transformers
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    specials = ["<|bos|>", "<|eos|>", "<|end|>", "<|start|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(alphabet) + len(specials):
        least = len(alphabet) + len(specials)
        raise ValueError(f"vocab_size={vocab_size} is too small: a byte-level tokenizer needs at least {least}")
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([_TEXT], trainer)
    bpe.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<|bos|>", eos_token="<|eos|>")
    fast.chat_template = _CHAT_TEMPLATE
    fast.save_pretrained(path)

"""The config.json of published models, with smaller sizes: the logits are those of transformers, or it is refused.

The tables have each model's flags as it was released; sizes that no flag depends on are those of `SIZES`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from minisgl.config import Config, ConfigError
from minisgl.engine import setup
from minisgl.options.compose import compose
from minisgl.plugin_manager.manager import PluginManager
from minisgl.testing.paged import PagedModel

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "rope_scaling": None}
LLAMA3 = LLAMA | {"rope_theta": 500000.0, "max_position_embeddings": 131072, "mlp_bias": False, "pretraining_tp": 1}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "max_position_embeddings": 32768}
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "max_position_embeddings": 32768,
    "max_window_layers": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "sliding_window": 8,
    "use_sliding_window": False,
}
QWEN3 = QWEN2 | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 32,
    "max_position_embeddings": 40960,
    "rope_scaling": None,
    "sliding_window": None,
}
QWEN3_MOE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}

SMOLLM3 = LLAMA | {
    "architectures": ["SmolLM3ForCausalLM"],
    "model_type": "smollm3",
    "layer_types": ["full_attention"] * 4,
    "max_position_embeddings": 65536,
    "max_window_layers": 28,
    "mlp_bias": False,
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0],
    "pad_token_id": 0,
    "pretraining_tp": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "tie_word_embeddings": ...,
    "use_sliding_window": False,
}
OLMO3 = {
    "architectures": ["Olmo3ForCausalLM"],
    "model_type": "olmo3",
    "attention_bias": False,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "max_position_embeddings": 65536,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500000,
    "sliding_window": 8,
}

GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 32,
    "hidden_act": ...,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32768,
    "num_hidden_layers": 6,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 24,
    "rms_norm_eps": 1e-6,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 8,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": ...,
}

QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 32,
    "use_sliding_window": False,
}

GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 32,
    "initial_context_length": 4096,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "max_position_embeddings": 131072,
    "num_experts_per_tok": 4,
    "num_local_experts": 8,
    "output_router_logits": False,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 8,
    "swiglu_limit": 7.0,
}

QWEN35 = {
    "attention_bias": False,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "full_attention_interval": 4,
    "head_dim": 32,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_value_head_dim": 16,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "rope_theta": ...,
    "torch_dtype": ...,
}


def multimodal(architecture: str, text: dict[str, Any], vision: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return the config.json of a multimodal model, with that of its ``text`` model inside."""
    inside = {key: value for key, value in {**SIZES, **text}.items() if value is not ...}
    shared = {"architectures": [architecture], "text_config": inside, "vision_config": vision}
    return {**dict.fromkeys(SIZES, ...), **shared, **fields}


def qwen35(kind: str, **fields: Any) -> dict[str, Any]:
    """Return the config.json of a Qwen3.5, ``kind`` "" or "Moe"."""
    name = f"qwen3_5{kind and '_moe'}"
    vision = {"depth": 2, "hidden_size": 16, "model_type": name, "num_heads": 2}
    shared = {"image_token_id": 318, "tie_word_embeddings": fields.get("tie_word_embeddings", False)}
    text = {**QWEN35, "model_type": f"{name}_text", **fields}
    return multimodal(f"Qwen3_5{kind}ForConditionalGeneration", text, vision, model_type=name, **shared)


def gemma3(**fields: Any) -> dict[str, Any]:
    """Return the config.json of a Gemma 3 of 4B or more."""
    vision = {"hidden_size": 16, "image_size": 28, "intermediate_size": 16, "num_attention_heads": 2, "patch_size": 14}
    shared = {"image_token_index": 319, "mm_tokens_per_image": 4, "tie_word_embeddings": ..., "eos_token_id": [1, 106]}
    text = {"hidden_act": ..., "model_type": "gemma3_text", "tie_word_embeddings": ..., "sliding_window": 8, **fields}
    vision |= {"model_type": "siglip_vision_model", "num_hidden_layers": 1, "vision_use_head": False}
    return multimodal("Gemma3ForConditionalGeneration", text, vision, model_type="gemma3", **shared)


def llama3_rope(factor: float) -> dict[str, Any]:
    """Return the RoPE scaling of Llama 3.1 (``factor`` 8) and 3.2 (32)."""
    lengths = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return {"factor": factor, "rope_type": "llama3", **lengths}


def yarn(factor: float, original: int, **fields: Any) -> dict[str, Any]:
    """Return YaRN scaling in the layout of transformers 4."""
    return {"factor": factor, "original_max_position_embeddings": original, "type": "yarn", **fields}


BY_LAYER = {
    "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
    "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
}
SERVED: dict[str, dict[str, Any]] = {
    "LLaMA 7B": LLAMA | {"num_key_value_heads": ..., "rms_norm_eps": 1e-6, "max_sequence_length": 2048},
    "Llama 2 7B": LLAMA | {"num_key_value_heads": 4, "pretraining_tp": 1, "torch_dtype": "float16"},
    "Llama 3 8B": LLAMA3 | {"max_position_embeddings": 8192},
    "Llama 3.1 8B": LLAMA3 | {"rope_scaling": llama3_rope(8.0)},
    "Llama 3.2 1B": LLAMA3 | {"rope_scaling": llama3_rope(32.0), "head_dim": 16, "tie_word_embeddings": True},
    "Llama 3.3 70B": LLAMA3 | {"rope_scaling": llama3_rope(8.0), "head_dim": 16},
    "Llama 3.1 Nemotron Nano 8B": LLAMA3 | {"rope_scaling": llama3_rope(8.0), "head_dim": 16},
    "TinyLlama 1.1B": LLAMA | {"max_position_embeddings": 2048, "pretraining_tp": 1},
    "Yi 1.5 9B": LLAMA | {"rope_theta": 5000000.0, "rms_norm_eps": 1e-6, "attention_bias": False},
    "CodeLlama 7B": LLAMA | {"rope_theta": 1000000, "max_position_embeddings": 16384},
    "DeepSeek LLM 7B": LLAMA | {"rms_norm_eps": 1e-6, "num_key_value_heads": 4},
    "DeepSeek Coder 33B": LLAMA | {"rope_scaling": {"factor": 4.0, "type": "linear"}, "rope_theta": 100000},
    "DeepSeek R1 Distill Llama 8B": LLAMA3 | {"rope_scaling": llama3_rope(8.0)},
    "Vicuna 7B 16k": LLAMA | {"rope_scaling": {"factor": 4.0, "type": "linear"}, "max_sequence_length": 16384},
    "LongChat 7B 32k": LLAMA | {"rope_scaling": {"factor": 8.0, "type": "linear"}, "num_key_value_heads": 4},
    "a dynamic-NTK fine-tune": LLAMA | {"rope_scaling": {"factor": 2.0, "type": "dynamic"}},
    "Falcon3 7B": LLAMA | {"head_dim": 32, "rope_theta": 1000042, "rms_norm_eps": 1e-6, "mlp_bias": False},
    "SmolLM2 135M": LLAMA
    | {"is_llama_config": True, "rope_interleaved": False, "tie_word_embeddings": True, "rope_theta": 100000},
    "an unsloth fine-tune": LLAMA3 | {"unsloth_fixed": True, "unsloth_version": "2024.9", "head_dim": 16},
    "Mistral 7B v0.1": MISTRAL | {"sliding_window": 8},
    "Mistral 7B v0.2": MISTRAL | {"sliding_window": None, "rope_theta": 1000000.0},
    "Mistral 7B v0.3": MISTRAL | {"sliding_window": None, "rope_theta": 1000000.0, "vocab_size": 328},
    "Mistral Nemo 12B": MISTRAL | {"sliding_window": None, "rope_theta": 1000000.0, "head_dim": 32},
    "Mistral Small 24B": MISTRAL | {"sliding_window": None, "rope_theta": 100000000.0, "head_dim": 32},
    "Ministral 8B": MISTRAL | {"sliding_window": 8, "head_dim": 32, "rope_theta": 100000000.0},
    "Yarn Mistral 7B 128k": MISTRAL | {"rope_scaling": yarn(16.0, 8192, finetuned=True), "sliding_window": 8},
    "Qwen1.5 7B": QWEN2 | {"num_key_value_heads": 4, "seq_length": 32768},
    "Qwen2 7B": QWEN2 | {"max_position_embeddings": 131072},
    "Qwen2.5 7B": QWEN2,
    "Qwen2.5 7B with YaRN": QWEN2 | {"rope_scaling": yarn(4.0, 32768)},
    "Qwen2.5 Math 7B": QWEN2 | {"rope_theta": 10000.0, "max_position_embeddings": 4096, "use_mrope": False},
    "QwQ 32B": QWEN2 | {"max_position_embeddings": 40960, "rms_norm_eps": 1e-5},
    "DeepSeek R1 Distill Qwen 7B": QWEN2 | {"rope_theta": 10000, "max_position_embeddings": 131072},
    "a Qwen2 that uses its window": QWEN2 | {"use_sliding_window": True},
    "Qwen3 0.6B": QWEN3 | {"tie_word_embeddings": True},
    "Qwen3 8B": QWEN3,
    "Qwen3 8B with YaRN": QWEN3 | {"rope_scaling": yarn(4.0, 32768)},
    "Qwen3 4B 2507": QWEN3 | {"rope_theta": 5000000, "max_position_embeddings": 262144},
    "Qwen3 30B-A3B": QWEN3_MOE,
    "Qwen3 Coder 30B-A3B": QWEN3_MOE
    | {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True, "rope_theta": 10000000},
    "Gemma 3 1B": GEMMA3,
    "Qwen3-Next 80B-A3B": QWEN3_NEXT,
    "Qwen3-Next 80B-A3B by transformers 5": QWEN3_NEXT
    | {
        "full_attention_interval": ...,
        "layer_types": [*["linear_attention"] * 3, "full_attention"],
        "partial_rotary_factor": ...,
        "rope_scaling": ...,
        "rope_theta": ...,
        "rope_parameters": {"rope_theta": 1e7, "rope_type": "default", "partial_rotary_factor": 0.25},
    },
    "Qwen3.5 0.8B": qwen35("", tie_word_embeddings=True, linear_num_value_heads=2),
    "Qwen3.5 27B": qwen35("", linear_num_value_heads=6),
    "Qwen3.5 35B-A3B": qwen35(
        "Moe",
        intermediate_size=...,
        linear_num_value_heads=4,
        moe_intermediate_size=48,
        num_experts=8,
        num_experts_per_tok=3,
        output_router_logits=False,
        router_aux_loss_coef=0.001,
        shared_expert_intermediate_size=32,
    ),
    "gpt-oss 20B": GPT_OSS,
    "gpt-oss 120B": GPT_OSS | {"num_local_experts": 12, "num_hidden_layers": 4},
    "Gemma 3 270M": GEMMA3
    | {"_sliding_window_pattern": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]},
    "Gemma 3 4B": gemma3(
        head_dim=32,
        num_key_value_heads=2,
        num_hidden_layers=6,
        rms_norm_eps=...,
        rope_scaling={"factor": 8.0, "rope_type": "linear"},
        rope_theta=...,
        max_position_embeddings=...,
    ),
    "Gemma 3 27B": gemma3(
        head_dim=16,
        num_hidden_layers=7,
        query_pre_attn_scalar=21,
        rope_scaling={"factor": 8.0, "rope_type": "linear"},
        rope_theta=...,
        max_position_embeddings=...,
    ),
    "Gemma 3 by transformers 5": GEMMA3
    | {"rope_parameters": BY_LAYER, "rope_theta": ..., "rope_local_base_freq": ..., "rope_scaling": ...},
    "SmolLM3 3B": SMOLLM3,
    "SmolLM3 3B base": SMOLLM3 | {"rope_theta": 2000000.0, "layer_types": ..., "no_rope_layers": ...},
    "SmolLM3 3B with YaRN": SMOLLM3 | {"rope_scaling": yarn(2.0, 65536)},
    "OLMo 3 7B": OLMO3 | {"rope_scaling": yarn(8.0, 8192, rope_type="yarn", attention_factor=1.2079441541679836)},
    "OLMo 3 7B before its context was extended": OLMO3 | {"max_position_embeddings": 8192, "rope_scaling": None},
    "OLMo 3 32B": OLMO3
    | {
        "rope_scaling": yarn(8.0, 8192, rope_type="yarn", attention_factor=1.2079441541679836),
        "num_key_value_heads": 2,
    },
}
"""Model → fields of config.json that differ from `SIZES`; the value ``...`` removes a field."""


def refused(architecture: str, model_type: str, **fields: Any) -> dict[str, Any]:
    """Return the fields of a model whose architecture no plugin implements."""
    return {"architectures": [architecture], "model_type": model_type, **fields}


LONGROPE = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
MLA = {"kv_lora_rank": 512, "q_lora_rank": None, "n_routed_experts": 8, "rope_scaling": yarn(40, 4096, mscale=0.707)}
NESTED: dict[str, Any] = dict.fromkeys(SIZES, ...) | {"text_config": SIZES, "vision_config": {"hidden_size": 64}}
REFUSED: dict[str, dict[str, Any]] = {
    "Phi-3 mini 128k": refused("Phi3ForCausalLM", "phi3", rope_scaling=LONGROPE, original_max_position_embeddings=4096),
    "Phi-4 mini": refused("Phi3ForCausalLM", "phi3", rope_scaling=LONGROPE, partial_rotary_factor=0.75),
    "Gemma 7B": refused("GemmaForCausalLM", "gemma", head_dim=256, hidden_activation=None),
    "Gemma 2 2B": refused("Gemma2ForCausalLM", "gemma2", final_logit_softcapping=30.0, query_pre_attn_scalar=256),
    "a Gemma 3 that embeds texts": GEMMA3 | {"use_bidirectional_attention": True},
    "a Gemma 3 with capped scores": GEMMA3 | {"attn_logit_softcapping": 50.0},
    "Llama 4 Scout": refused("Llama4ForConditionalGeneration", "llama4", **NESTED),
    "Mistral Small 3.1": refused("Mistral3ForConditionalGeneration", "mistral3", **NESTED),
    "Granite 3.3 8B": refused("GraniteForCausalLM", "granite", embedding_multiplier=12.0, logits_scaling=16.0),
    "Granite 4 tiny": refused("GraniteMoeHybridForCausalLM", "granitemoehybrid", position_embedding_type="nope"),
    "OLMo 2 7B": refused("Olmo2ForCausalLM", "olmo2", rope_theta=500000),
    "Command R": refused("CohereForCausalLM", "cohere", logit_scale=0.0625, rms_norm_eps=...),
    "InternLM2 7B": refused("InternLM2ForCausalLM", "internlm2", rope_scaling={"type": "dynamic", "factor": 2.0}),
    "InternLM3 8B": refused("InternLM3ForCausalLM", "internlm3", rope_scaling={"type": "dynamic", "factor": 6.0}),
    "EXAONE 4 32B": refused("Exaone4ForCausalLM", "exaone4", sliding_window_pattern="LLLG"),
    "GLM-4 9B": refused("Glm4ForCausalLM", "glm4", partial_rotary_factor=0.5, attention_bias=True),
    "Nemotron 4 Mini": refused("NemotronForCausalLM", "nemotron", hidden_act="relu2", partial_rotary_factor=0.5),
    "MiniCPM 2B": refused("MiniCPMForCausalLM", "minicpm", scale_emb=12, scale_depth=1.4, dim_model_base=256),
    "MiniCPM4 8B": refused("MiniCPMForCausalLM", "minicpm", rope_scaling={**LONGROPE, "rope_type": "longrope"}),
    "StarCoder2 7B": refused("Starcoder2ForCausalLM", "starcoder2", hidden_act="gelu_pytorch_tanh", use_bias=True),
    "StableLM 2": refused("StableLmForCausalLM", "stablelm", partial_rotary_factor=0.25, layer_norm_eps=1e-5),
    "Mixtral 8x7B": refused("MixtralForCausalLM", "mixtral", num_local_experts=8, sliding_window=None),
    "Qwen1.5 MoE": refused("Qwen2MoeForCausalLM", "qwen2_moe", num_experts=60, shared_expert_intermediate_size=48),
    "DeepSeek V2 Lite": refused("DeepseekV2ForCausalLM", "deepseek_v2", **MLA),
    "DeepSeek V3": refused("DeepseekV3ForCausalLM", "deepseek_v3", **MLA | {"q_lora_rank": 1536}),
    "Ministral 3": refused("Ministral3ForCausalLM", "ministral3", rope_parameters=yarn(16.0, 16384)),
    "GPT-2": refused("GPT2LMHeadModel", "gpt2", n_head=12, num_attention_heads=...),
    "Mamba": refused("MambaForCausalLM", "mamba", num_attention_heads=...),
}
"""Model → fields of config.json. The message must name the architecture."""


@pytest.fixture(scope="module")
def manager() -> PluginManager:
    """Return one plugin manager for all tests of the module."""
    return PluginManager.load()


@pytest.fixture(scope="module")
def options(manager: PluginManager) -> Config:
    """Return the options of an engine, for any model."""
    return compose(manager, ["device=cpu", "load_format=dummy"])


def write(folder: Path, fields: dict[str, Any]) -> None:
    """Write the config.json of a table's entry."""
    raw = {key: value for key, value in {**SIZES, **fields}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize("name", SERVED)
def test_served(name: str, tmp_path: Path, manager: PluginManager) -> None:
    write(tmp_path, SERVED[name])
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(tmp_path), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            mean = (
                0 if "norm" in name and theirs.config.model_type.startswith(("qwen3_next", "qwen3_5")) else 1
            )  # zero-centred norms
            parameter.copy_(mean + 0.2 * noise if noise.ndim == 1 else 1.5 * noise / noise.shape[-1] ** 0.5)
    stored = dict(theirs.state_dict())
    if theirs.config.tie_word_embeddings:
        del stored["lm_head.weight"]
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    ids = torch.arange(5, 45)
    with torch.inference_mode():
        want = theirs(ids[None], use_cache=False).logits[0]
    (got,) = PagedModel(tmp_path, max_seq_len=48, max_running_requests=1, manager=manager).run([(0, 0, ids)])
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


def build(config: Config, manager: PluginManager) -> None:
    """Build the model of ``config`` as far as the choice of its class."""
    path, model = setup.read_model(config, manager)
    ctx: Any = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32, part=None)
    setup.build_model(config, manager, path, model, ctx)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path, manager: PluginManager, options: Config) -> None:
    """The message names the architecture, and suggests no other one."""
    write(tmp_path, REFUSED[name])
    config = replace(options, model=str(tmp_path))
    with pytest.raises(ConfigError) as refusal:
        build(config, manager)
    message = str(refusal.value)
    assert REFUSED[name]["architectures"][0] in message
    assert "Did you mean" not in message
    assert "plugins=" in message or "text_config" in message or "lacks the field" in message

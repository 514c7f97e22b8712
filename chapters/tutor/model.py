"""The architectures of `tutor` and its siblings: building, attention over packed rows, and export to a folder.

The models are transformers' Qwen3 and Qwen3.5 classes, so that transformers can load the exported folders. This module
adds an attention function in which a token attends only to its own document of a packed row, and layers of linear
attention whose state holds only this document (`delta`). It knows nothing of the training text or of learning-rate
schedules.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import (
    AttentionInterface,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from minisgl.chapters.tutor.delta import gated_delta, short_convolution
from minisgl.chapters.tutor.tokenizer import VOCABULARY

END_IDS = [2, 0]  # <|im_end|>, <|endoftext|>
CONTEXT = 2048
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": CONTEXT,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "bos_token_id": None,
    "eos_token_id": END_IDS,
    "pad_token_id": 0,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_HYBRID: dict[str, Any] = {
    "intermediate_size": 256,
    "num_hidden_layers": 8,
    "full_attention_interval": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
}
_SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
NAMES = ("tutor", "tutor-moe", "tutor-hybrid", "tutor-draft")


def build(name: str, **changes: Any) -> PreTrainedModel:
    """Return an untrained model in float32.

    ``name`` is one of `NAMES`, else KeyError. Tests pass ``changes`` to override fields of the model's config.
    """
    if name in ("tutor", "tutor-draft"):
        smaller = _SMALL if name == "tutor-draft" else {}
        model: PreTrainedModel = Qwen3ForCausalLM(Qwen3Config(**{**_SHAPE, **smaller, **changes}))
    elif name == "tutor-moe":
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**_SHAPE, **_EXPERTS, **changes}))
    elif name == "tutor-hybrid":
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**{**_SHAPE, **_HYBRID, **changes}))
    else:
        raise KeyError(f"there is no architecture {name!r}; known are {', '.join(NAMES)}")
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp.forward = MethodType(_dense_mixture, layer.mlp)
        if hasattr(layer, "linear_attn"):
            _initialize(layer.linear_attn)
            layer.linear_attn.forward = MethodType(_packed_linear_attention, layer.linear_attn)
    model.set_attn_implementation("tutor_packed")
    return model.float()


def document_mask(documents: Tensor, dense: bool = True) -> Tensor | BlockMask:
    """Return the causal attention mask within the documents of packed rows.

    ``documents`` [rows, length] holds the document number of each token; a token attends to itself and to earlier
    tokens of its own document. The result is a bool mask [rows, 1, length, length] if ``dense``. Otherwise it is a
    `BlockMask` for FlexAttention (arXiv:2412.05496), which is faster on a GPU.
    """
    rows, length = documents.shape
    if dense:
        same = documents[:, None, :, None] == documents[:, None, None, :]
        return same & torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()

    def visible(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents[row, query] == documents[row, key])

    return _compiled_block_mask(visible, rows, None, length, length, device=documents.device)


_compiled_block_mask = torch.compile(create_block_mask)
_compiled_flex = torch.compile(flex_attention)


def _packed_attention(
    _module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: None, scaling: float, **options: Any
) -> tuple[Tensor, None]:
    mask = options["document_mask"]
    if isinstance(mask, BlockMask):
        out = _compiled_flex(query, key, value, block_mask=mask, scale=scaling, enable_gqa=True)
    else:
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("tutor_packed", _packed_attention)


def _initialize(net: Any) -> None:
    """Let the heads of linear attention begin with memories of different lengths, and the convolution as PyTorch's.

    The bias of a head is such that softplus(bias) lies between 0.001 and 0.1, evenly on a logarithmic scale, as in
    Mamba-2 (arXiv:2405.21060). With transformers' bias of 1, most heads forget a token at once.
    """
    steps = torch.exp(torch.empty_like(net.dt_bias).uniform_(math.log(0.001), math.log(0.1)))
    net.dt_bias.data.copy_(steps.expm1().log())
    net.conv1d.reset_parameters()


def _packed_linear_attention(self: Any, hidden_states: Tensor, documents: Tensor, **_options: Any) -> Tensor:
    """Compute a layer of linear attention of packed rows; ``documents`` [rows, length] as for `document_mask`."""
    mixed = short_convolution(self.in_proj_qkv(hidden_states), self.conv1d.weight, documents)
    sizes = [self.key_dim, self.key_dim, self.value_dim]
    dims = [self.head_k_dim, self.head_k_dim, self.head_v_dim]
    parts = F.silu(mixed).float().split(sizes, dim=-1)
    q, k, v = (part.unflatten(-1, (-1, dim)) for part, dim in zip(parts, dims, strict=True))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    beta = self.in_proj_b(hidden_states).float().sigmoid()
    log_decay = -self.A_log.exp() * F.softplus(self.in_proj_a(hidden_states).float() + self.dt_bias)
    with torch.autocast(mixed.device.type, enabled=False):
        read = gated_delta(q * self.head_k_dim**-0.5, k, v, beta, log_decay, documents)
    gate = self.in_proj_z(hidden_states).view(read.shape)
    out: Tensor = self.out_proj(self.norm(read.to(mixed.dtype), gate).flatten(2))
    return out


def _dense_mixture(self: Any, hidden: Tensor) -> Tensor:
    """Run every expert on every token, and weight the outputs by the router. ``hidden`` is [..., hidden_size].

    For small experts this is faster than sorting the tokens by expert. It also sets ``self.balance``, the
    load-balancing loss of Switch Transformers (arXiv:2101.03961), which is 1 when all experts are used evenly. The loss
    is computed over the whole batch, which mixes domains: balancing each sequence would prevent an expert from
    specialising in a domain.
    """
    experts, inner = self.experts, self.experts.down_proj.shape[-1]
    tokens = hidden.reshape(-1, hidden.shape[-1])
    chances = F.linear(tokens, self.gate.weight).float().softmax(-1)  # [tokens, experts]
    best, chosen = chances.topk(self.gate.top_k, dim=-1)
    used = torch.zeros_like(chances).scatter(1, chosen, best / best.sum(-1, keepdim=True))
    self.balance = chances.shape[-1] * ((used > 0).float().mean(0) / self.gate.top_k * chances.mean(0)).sum()
    gate, up = F.linear(tokens, experts.gate_up_proj.flatten(0, 1)).unflatten(1, (-1, 2, inner)).unbind(2)
    weighted = experts.act_fn(gate) * up * used.to(gate.dtype)[:, :, None]  # [tokens, experts, inner]
    out = F.linear(weighted.flatten(1), experts.down_proj.transpose(0, 1).flatten(1))
    return out.reshape(hidden.shape)


def balance_loss(model: PreTrainedModel) -> Tensor:
    """Return the load-balancing loss of the last forward pass, averaged over the layers."""
    return torch.stack([layer.mlp.balance for layer in model.model.layers]).mean()


def export(model: PreTrainedModel, folder: Path, tokenizer: Path) -> None:
    """Write the model in bf16 and its configs to ``folder``, and copy the tokenizer's files from ``tokenizer``."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = type(model)(model.config)
    plain.load_state_dict(model.state_dict())
    plain.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    config = json.loads((folder / "config.json").read_text())
    config["rope_theta"] = config["rope_parameters"][
        "rope_theta"
    ]  # transformers before version 5 reads rope_theta here
    config.pop("partial_rotary_factor", None)  # rope_parameters has the right one
    if "num_local_experts" in config:
        config["num_experts"] = config["num_local_experts"]
    _write_json(folder / "config.json", config)
    generation = {"eos_token_id": END_IDS, "pad_token_id": 0}
    _write_json(folder / "generation_config.json", generation)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if tokenizer.resolve() != folder.resolve():
            shutil.copy(tokenizer / name, folder / name)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")

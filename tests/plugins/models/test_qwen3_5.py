"""Qwen3.5: the text part, dense and with experts, as transformers computes it, and in multimodal checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from minisgl import LLM, SamplingParams
from minisgl.config import ConfigError
from minisgl.models.shipped import weights_dir
from minisgl.plugins.models.qwen3_5 import CLASSES
from minisgl.testing.idle import check_idle
from minisgl.testing.model import ModelConformance
from minisgl.testing.oracle import Oracle
from minisgl.testing.paged import PagedModel

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "full_attention_interval": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
    },
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 32,
}


def write(folder: Path, name: str, **fields: Any) -> Path:
    """Write a random checkpoint of the architecture ``name``."""
    cls = getattr(transformers, name)
    with torch.random.fork_rng(devices=[]):
        model = cls(cls.config_class(**SIZES, **fields)).float()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            mean = 0 if "norm" in key and "linear_attn" not in key else 1  # zero-centred norms
            parameter.copy_(mean + 0.2 * noise if noise.ndim == 1 else noise / noise.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    return folder


class TestDense(ModelConformance):
    name, fields = "Qwen3_5ForCausalLM", {}

    def make(self) -> type:
        """Return the model class to test."""
        return CLASSES[self.name]

    def checkpoint(self, folder: Path) -> Path:
        """Write the checkpoint."""
        return write(folder, self.name, **self.fields)


class TestExperts(TestDense):
    name, fields = "Qwen3_5MoeForCausalLM", EXPERTS


@pytest.mark.parametrize(
    ("name", "page_size", "num_pages", "spacing", "tp"),
    [("Qwen3_5ForCausalLM", 16, 22, 16, 2), ("Qwen3_5MoeForCausalLM", 1, 260, 24, 1)],
)
def test_promise_8_with_saved_states(
    name: str, page_size: int, num_pages: int, spacing: int, tp: int, tmp_path: Path
) -> None:
    """Greedy tokens are those of transformers: cold and warm, alone and eight at a time, in chunks, and retracted."""
    path = write(tmp_path, name, **(EXPERTS if "Moe" in name else {}))
    sizes = f"page_size={page_size} num_pages={num_pages} cache.spacing={spacing} tp={tp} cache.snapshots=6"
    words = f"device=cpu cache=states max_prefill_tokens=40 max_seq_len=160 max_running_requests=8 {sizes}"
    greedy = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    long = [(7 * i * i + 3) % 320 for i in range(100)]
    prompts = [long, [*long[:60], 5, 6], [*long[:97], 1], long[1:50], [4, 5], long[:49], [*long[:48], 9], long[5:90]]
    with LLM(str(path), overrides=words.split()) as llm:
        outputs = [llm.generate([prompt], greedy)[0] for prompt in (long, long)]
        assert [output.cached_tokens for output in outputs] == [0, 99 // spacing * spacing]
        llm.scheduler.cache_manager.reserve.mean_length = 0.0  # admit more than fit to their end
        outputs += llm.generate(prompts, greedy)
        stats = llm.scheduler.stats()
    Oracle(path).check_all([long, long, *prompts], [list(output.token_ids) for output in outputs])
    assert stats["retractions"] > 0
    assert sum(output.cached_tokens > 0 for output in outputs) > 4


def test_promise_8_with_the_embedded_hybrid() -> None:
    """`tutor-hybrid` with `cache=states` gives the greedy tokens of transformers, after a hit as after a miss."""
    book = "\n".join(f"Room {n} belongs to team {(7 * n) % 31}, and opens at {n % 12 + 1}:15." for n in range(12))
    begin, middle, end = f"<|im_start|>system\n{book}<|im_end|>\n", "<|im_start|>user\n", "<|im_end|>\n<|im_start|>"
    asked = [f"{begin}{middle}When does room {n} open?{end}assistant\n" for n in (3, 9)]
    greedy, texts = SamplingParams(temperature=0.0, max_tokens=16), []
    for page_size in (1, 16):
        words = f"device=cpu dtype=float32 cache=states cache.spacing=64 page_size={page_size} max_prefill_tokens=128"
        with LLM("tutor-hybrid", overrides=[*words.split(), f"num_pages={2048 // page_size}"]) as llm:
            prompts = [llm.tokenizer.encode(text) for text in asked]
            outputs = [llm.generate([prompts[0]], greedy)[0], *llm.generate([*prompts, prompts[0]], greedy)]
            check_idle(llm.scheduler)
        assert [output.cached_tokens >= 192 for output in outputs] == [False, True, True, True]
        texts.append([list(output.token_ids) for output in outputs])
    assert texts[0] == texts[1]
    assert texts[0][0] == texts[0][1] == texts[0][3]
    Oracle(weights_dir("tutor-hybrid")).check_all(prompts, texts[0][1:3])


def test_text_part_of_a_multimodal_checkpoint(tmp_path: Path) -> None:
    text, whole = write(tmp_path / "text", "Qwen3_5ForCausalLM"), tmp_path / "whole"
    whole.mkdir()
    config = json.loads((text / "config.json").read_text())
    nested = {"text_config": config, "vision_config": {"depth": 2}, "model_type": "qwen3_5"}
    nested["architectures"] = ["Qwen3_5ForConditionalGeneration"]
    (whole / "config.json").write_text(json.dumps(nested))
    tensors = {
        (f"model.language_model.{name.split('model.')[-1]}" if "lm_head" not in name else name): tensor
        for name, tensor in load_file(text / "model.safetensors").items()
    }
    assert any(name.startswith("model.language_model.layers.0.linear_attn.in_proj_qkv") for name in tensors)
    more = {"model.visual.patch_embed.proj.weight": torch.ones(3), "mtp.fc.weight": torch.ones(3)}
    save_file(tensors | more, whole / "model.safetensors")
    (want,), (got,) = (PagedModel(path).run([(0, 0, [5, 6, 7, 8])]) for path in (text, whole))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attn_output_gate": False}, "attn_output_gate=False is not supported"),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types has no full_attention"),
        ({"architectures": ["Qwen3_5ForConditionalGeneration"]}, "text_config of a Qwen3_5ForConditionalGeneration"),
    ],
)
def test_configs_that_are_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    raw = {"architectures": ["Qwen3_5ForCausalLM"], "max_position_embeddings": 512, **SIZES, **fields}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=message):
        LLM(str(tmp_path), overrides=["device=cpu", "num_pages=64", "load_format=dummy"])

"""The text part of a multimodal Gemma 3: both layouts of its checkpoint, and a config.json that leaves out sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.models.gemma3 import MULTIMODAL, Gemma3ForCausalLM, minisgl_read_config
from minisgl.testing.model import ModelConformance
from minisgl.testing.paged import PagedModel

VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
TEXT = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "max_position_embeddings": 512,
    "sliding_window": 9,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
}


class TestGemma3(ModelConformance):
    architecture = "gemma3"

    def make(self) -> type:
        """Return the model class to test."""
        return Gemma3ForCausalLM


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor, torch.Tensor]:
    """Return a multimodal checkpoint, token ids, and transformers' logits for them."""
    path = tmp_path_factory.mktemp("gemma3")
    config = transformers.Gemma3Config(
        text_config=TEXT, vision_config=VISION, mm_tokens_per_image=4, image_token_index=319
    )
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(0.2 * noise if "norm" in name or "embed" in name else noise / weight.shape[-1] ** 0.5)
    model.save_pretrained(path)
    ids = torch.arange(5, 45)
    with torch.inference_mode():
        logits = model(ids[None], use_cache=False).logits[0]
    return path, ids, logits


@pytest.mark.parametrize("layout", ["published", "transformers 5", "text only inside"])
def test_text_part(layout: str, made: tuple[Path, torch.Tensor, torch.Tensor], tmp_path: Path) -> None:
    path, ids, want = made
    renamed: dict[str, Any] = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        text = name.removeprefix("model.language_model.").removeprefix("language_model.model.")
        if layout == "published":
            name = f"language_model.model.{text}" if text != name else name.removeprefix("model.")
        if layout == "transformers 5":
            name = f"model.language_model.{text}" if text != name else f"model.{name.removeprefix('model.')}"
        if layout != "text only inside" or text != name:
            renamed[name] = tensor
    assert layout == "text only inside" or any("vision_tower" in name for name in renamed)
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    (got,) = PagedModel(tmp_path, max_seq_len=48, max_running_requests=1).run([(0, 0, ids)])
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


def test_sizes_that_config_json_leaves_out() -> None:
    """The published 4B names few sizes: the others are the defaults of transformers. Its context is not 8 × longer."""
    raw = {
        "architectures": [MULTIMODAL],
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16",
        "vision_config": VISION,
    }
    from minisgl.models.config import ModelConfig

    config = ModelConfig.from_dict(minisgl_read_config(raw) or {})
    theirs = transformers.Gemma3Config(**json.loads(json.dumps(raw))).text_config
    for name in ("vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"):
        assert getattr(config, name) == getattr(theirs, name)
    assert (config.dtype, config.max_len, config.tie_word_embeddings) == ("bfloat16", 131072, True)
    assert config.rope_by_layer_type["full_attention"].factor == 8.0
    assert config.rope_by_layer_type["sliding_attention"].rope_theta == 10_000.0


def test_other_models_are_left_alone() -> None:
    assert PluginManager.load().hook.minisgl_read_config(raw={"architectures": ["LlamaForCausalLM"]}) is None

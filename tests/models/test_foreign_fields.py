"""A model class refuses the checkpoint of another architecture, also if it has the same tensors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from minisgl.config import Config, ConfigError
from minisgl.engine import setup
from minisgl.options.compose import compose
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.models.llama import LlamaForCausalLM
from minisgl.testing.checkpoints import tiny_checkpoint
from minisgl.testing.paged import PagedModel

TINY: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
SAME_TENSORS: dict[str, dict[str, Any]] = {
    "Cwm": {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8},
    "Ernie4_5": {},  # rotates neighbouring dimensions
    "Gemma": {},
    "Granite": {"embedding_multiplier": 12.0, "logits_scaling": 8.0},
    "Helium": {},  # rotates neighbouring dimensions
    "SmolLM3": {"no_rope_layers": [1, 0]},
}
"""transformers' architectures whose tensors have the names and shapes of Llama's → fields of the configuration."""


@pytest.fixture(scope="module")
def manager() -> PluginManager:
    """Return one plugin manager for all tests of the module."""
    return PluginManager.load()


@pytest.fixture(scope="module")
def options(manager: PluginManager) -> Config:
    """Return the options of an engine, for any model."""
    return compose(manager, ["device=cpu"])


@pytest.mark.parametrize("name", SAME_TENSORS)
def test_same_tensors(name: str, tmp_path: Path, manager: PluginManager) -> None:
    """``architecture=LlamaForCausalLM`` does not serve these models: the logits would be wrong."""
    config = getattr(transformers, f"{name}Config")(**TINY, **SAME_TENSORS[name])
    getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match=r"model_type .* but \w+ computes models of type 'llama'.*plugins=.*Add a model"
    ):
        PagedModel(tmp_path, model=LlamaForCausalLM, manager=manager)


@pytest.mark.parametrize(
    "fields",
    [
        {"embedding_multiplier": 12.0},
        {"attention_multiplier": 0.25},
        {"residual_multiplier": 0.22},
        {"logits_scaling": 8},
        {"logit_scale": 0.0625},
        {"final_logit_softcapping": 30.0},
        {"query_pre_attn_scalar": 256},
        {"scale_emb": 12},
        {"no_rope_layers": [1, 0]},
        {"layer_types": ["sliding_attention", "full_attention"]},
        {"is_causal": False},
        {"rope_interleaved": True},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 1000.0}},
        {"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e4}}},
        {"rope_parameters": {"rope_type": "mrope", "rope_theta": 1e4}},
        {"partial_rotary_factor": 0.5},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_unknown_fields(fields: dict[str, Any], tmp_path: Path, manager: PluginManager) -> None:
    """A field that Llama does not compute is refused by name, in whatever file it is."""
    path = tiny_checkpoint("llama", tmp_path)
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**raw, **fields}))
    with pytest.raises(ConfigError, match=f"{next(iter(fields))}|alpha|rope_type"):
        PagedModel(path, manager=manager)


def test_neutral_values(tmp_path: Path, manager: PluginManager) -> None:
    """Fields with values that change nothing, as published checkpoints have them, are accepted."""
    path = tiny_checkpoint("llama", tmp_path)
    raw = json.loads((path / "config.json").read_text())
    neutral = {
        "embedding_multiplier": 1.0,
        "final_logit_softcapping": None,
        "no_rope_layers": [1, 1],
        "layer_types": ["full_attention"] * 2,
        "rope_interleaved": False,
        "is_causal": True,
        "partial_rotary_factor": 1.0,
    }
    (path / "config.json").write_text(
        json.dumps({**raw, **neutral, "unsloth_version": "2024.9", "is_llama_config": True})
    )
    PagedModel(path, manager=manager)


def test_a_subclass_checks_for_itself(tmp_path: Path, manager: PluginManager) -> None:
    """A plugin may subclass a class for another model_type: it inherits the defaults, and not the check."""

    class Granite(LlamaForCausalLM):
        pass

    path = tiny_checkpoint("llama", tmp_path)
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**raw, "model_type": "granite", "logits_scaling": 8.0}))
    PagedModel(path, model=Granite, manager=manager)


@pytest.mark.parametrize(
    ("name", "guess"), [("LamaForCausalLM", "LlamaForCausalLM"), ("GraniteForCausalLM", ""), ("MixtralForCausalLM", "")]
)
def test_suggestions(name: str, guess: str, tmp_path: Path, manager: PluginManager, options: Config) -> None:
    """Only a typing error in the option ``architecture`` is worth a suggestion."""
    path = tiny_checkpoint("llama", tmp_path)
    config = replace(options, model=str(path), architecture=name)
    _, model = setup.read_model(config, manager)
    with pytest.raises(ConfigError, match=r"no plugin has a model class of that name\.") as refusal:
        setup.build_model(config, manager, path, model, None)  # type: ignore[arg-type]
    assert ("Did you mean" in str(refusal.value)) == bool(guess)
    assert f"Did you mean {guess}?" in str(refusal.value) or not guess


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"type": "dynamic", "factor": 4.0}, 512),
        ({"type": "linear", "factor": 4.0}, 2048),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else "",
)
def test_max_seq_len(rope: dict[str, Any], limit: int, tmp_path: Path, manager: PluginManager, options: Config) -> None:
    """``max_seq_len`` may be as long as the scaling allows; the message says why dynamic scaling allows no more."""
    path = tiny_checkpoint("llama", tmp_path)
    raw = json.loads((path / "config.json").read_text())
    del raw["rope_parameters"]
    (path / "config.json").write_text(json.dumps({**raw, "rope_scaling": rope}))
    longest = replace(options, model=str(path), max_seq_len=limit)
    _, model = setup.read_model(longest, manager)
    assert setup.resolve_max_seq_len(longest, model) == model.max_len == limit
    too_long = replace(longest, max_seq_len=limit + 1)
    why = "RoPE scaling .dynamic. rotates every token" if rope["type"] == "dynamic" else f"the {limit} positions"
    with pytest.raises(ConfigError, match=why):
        setup.resolve_max_seq_len(too_long, model)

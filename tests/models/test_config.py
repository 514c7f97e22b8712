"""Reading of config.json in old and new layouts, and errors for configurations that are not supported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minisgl.config import ConfigError
from minisgl.layers.attention import RopeConfig, frequencies
from minisgl.models.config import ModelConfig
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.models.rope_scaling import ScaledRope

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def config(**changes: Any) -> ModelConfig:
    """Return the configuration `BASE` with changes; ``...`` as a value removes the key."""
    return ModelConfig.from_dict({k: v for k, v in {**BASE, **changes}.items() if v is not ...})


def test_defaults() -> None:
    c = config(num_key_value_heads=...)
    assert (c.head_dim, c.num_key_value_heads, c.rms_norm_eps) == (16, 4, 1e-6)
    assert (c.tie_word_embeddings, c.attention_bias, c.hidden_act) == (False, False, "silu")
    assert c.rope == RopeConfig()
    assert (c.num_experts, c.sliding_window, c.dtype) == (0, None, "float32")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_theta": 5e5}, {"rope_theta": 5e5}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, {"rope_theta": 5e5}),
        ({"rope_theta": 5e5, "rope_scaling": None}, {"rope_theta": 5e5}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4}},
            {"rope_type": "linear", "rope_theta": 5e5, "factor": 4},
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4}},
            {"rope_type": "linear", "rope_theta": 5e5, "factor": 4},
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}},
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128},
        ),
        (
            {"original_max_position_embeddings": 64, "rope_scaling": {"rope_type": "yarn", "factor": None}},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_theta": 5e5}},
            {"rope_type": "linear", "factor": 2},
        ),
    ],
)
def test_rope_layouts(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    scaled = {"original_max_position_embeddings": 256, **expected}
    assert config(**changes).rope == (ScaledRope(**scaled) if "rope_type" in expected else RopeConfig(**expected))


def test_yarn_extends_the_context() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 200}
    assert config(rope_scaling=yarn).max_len == 800
    assert config(rope_scaling={**yarn, "factor": 1.0}).max_len == 256


def test_linear_scaling_extends_the_context() -> None:
    """As in vLLM and SGLang: ``max_position_embeddings`` is the length before the scaling."""
    assert config(rope_scaling={"type": "linear", "factor": 4.0}).max_len == 1024


def test_scaling_by_length_does_not_extend_the_context() -> None:
    """Beyond the original context, dynamic and longrope scaling give every token other angles."""
    assert config(rope_scaling={"type": "dynamic", "factor": 4.0}).max_len == 256
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    long = {"type": "longrope", "original_max_position_embeddings": 64, **factors}
    assert config(rope_scaling=long).max_len == 64


def test_rope_by_layer_type() -> None:
    """If all types have equal parameters, these are the model's; otherwise only a plugin can build the tables."""
    both = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e6}}
    c = config(rope_parameters=both)
    assert c.rope.rope_theta == 1e6
    assert c.rope_by_layer_type == {"full_attention": c.rope, "sliding_attention": c.rope}
    c = config(rope_parameters=both | {"sliding_attention": {"rope_theta": 1e4}})
    assert [rope.rope_theta for rope in c.rope_by_layer_type.values()] == [1e6, 1e4]
    with pytest.raises(ConfigError, match=r"differ by layer type.* ModelConfig\.rope_by_layer_type"):
        frequencies(c.rope, 16)


def test_what_only_some_architectures_compute_is_not_refused() -> None:
    """The model class refuses it, so that a plugin can compute it."""
    assert config(partial_rotary_factor=0.5).rope.partial_rotary_factor == 0.5
    assert config(rope_scaling={"type": "mrope", "mrope_section": [4, 4]}).rope.rope_type == "mrope"


def test_both_names_of_num_experts() -> None:
    assert config(num_experts=8).num_experts == config(num_local_experts=8).num_experts == 8


def test_windows() -> None:
    assert config(sliding_window=7).sliding_window == 7
    assert config(sliding_window=7, use_sliding_window=False).sliding_window is None
    c = config(sliding_window=7, use_sliding_window=True, max_window_layers=2)
    assert [c.window(i) for i in range(3)] == [-1, -1, 7]
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    c = config(sliding_window=7, use_sliding_window=True, max_window_layers=2, layer_types=types)
    assert [c.window(i) for i in range(3)] == [7, -1, 7]
    with pytest.raises(ConfigError, match="layer 0 a sliding window, but"):
        config(sliding_window=7, use_sliding_window=False, layer_types=types).window(0)
    with pytest.raises(ConfigError, match="one entry for each of the 3 layers"):
        config(layer_types=types[:2]).window(0)
    with pytest.raises(ConfigError, match="layer_types has 'conv'"):
        config(layer_types=["conv", *types[1:]]).window(0)


@pytest.mark.parametrize(("key", "value"), [("dtype", "bfloat16"), ("torch_dtype", "bfloat16")])
def test_both_names_of_dtype(key: str, value: str) -> None:
    assert config(**{key: value}).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": ...}, "hidden_size must be a positive integer, got None"),
        ({"vocab_size": 0}, "vocab_size must be a positive integer, got 0"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers must be a positive integer, got '3'"),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) must be a multiple of num_key_value_heads \(3\)"),
        ({"architectures": ...}, r"architectures must name one model class, got \[\]"),
        ({"rope_scaling": {"type": "linear"}}, "rope_type 'linear' needs factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "needs low_freq_factor, high_freq_factor"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor must be a number, got '2'"),
        ({"rope_scaling": "linear"}, "must be an object, got 'linear'"),
        ({"rope_theta": None}, "rope_theta must be a number, got None"),
        ({"rms_norm_eps": None}, "rms_norm_eps must be a number, got None"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, got 'false'"),
        ({"head_dim": 0}, "head_dim must be a positive integer, got 0"),
        ({"sliding_window": 0}, "sliding_window must be a positive integer, got 0"),
        ({"hidden_size": ..., "n_embd": 64}, "the config.json of this LlamaForCausalLM lacks the field"),
    ],
)
def test_unsupported_configs_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**changes)


@pytest.mark.parametrize("missing", ["hidden_size", "vocab_size"])
def test_multimodal_models_that_no_plugin_reads_are_refused(missing: str, tmp_path: Path) -> None:
    manager = PluginManager.load()
    manager.load_all("models")
    raw = {key: value for key, value in config().raw.items() if key != missing}
    (tmp_path / "config.json").write_text(json.dumps({**raw, "llm_config": {missing: 64}}))
    with pytest.raises(
        ConfigError, match=r"config\.json: A LlamaFor.* nests the sizes .* in llm_config, as multimodal"
    ):
        ModelConfig.from_dir(tmp_path, manager.hook.minisgl_read_config)
    (tmp_path / "config.json").write_text(json.dumps({**config().raw, "llm_config": {}}))
    assert ModelConfig.from_dir(tmp_path, manager.hook.minisgl_read_config).vocab_size == config().vocab_size


def test_invalid_config_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        ModelConfig.from_dir(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="can't be read as JSON"):
        ModelConfig.from_dir(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="must hold a JSON object"):
        ModelConfig.from_dir(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["X"], "num_attention_heads": 0}')
    with pytest.raises(ConfigError, match=r"config\.json: num_attention_heads must be a positive integer"):
        ModelConfig.from_dir(tmp_path)

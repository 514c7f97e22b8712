"""A config.json that lacks a field, or has null in its place: the logits are those of transformers, or it is refused.

transformers has a default for each field in the configuration class of each architecture. The tests remove one field
at a time from a configuration in which almost every field changes the logits or the names of the tensors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from minisgl.config import ConfigError
from minisgl.plugin_manager.manager import PluginManager
from minisgl.testing.checkpoints import tiny_checkpoint
from minisgl.testing.paged import PagedModel

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
WINDOWS = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
ROUTING = {"norm_topk_prob": True, "decoder_sparse_step": 2, "mlp_only_layers": [1]}
COMMON: dict[str, Any] = {"rope_theta": 5e3, "rope_scaling": YARN, "rms_norm_eps": 1e-3}
"""The layout of transformers 4, which most published checkpoints have."""
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 5},
    "qwen2": WINDOWS,
    "qwen3": WINDOWS,
    "qwen3_moe": {"use_sliding_window": True, "sliding_window": 5, "num_hidden_layers": 4, **ROUTING},
}
REQUIRED = {"architectures", "hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads"}
REQUIRED |= {"num_hidden_layers", "vocab_size"}
SHAPES = {"decoder_sparse_step", "head_dim", "mlp_only_layers", "moe_intermediate_size", "num_experts"}
SHAPES |= {"num_key_value_heads"}
UNREAD = {"attention_dropout", "bos_token_id", "dtype", "eos_token_id", "initializer_range", "output_router_logits"}
UNREAD |= {"pad_token_id", "pretraining_tp", "router_aux_loss_coef", "transformers_version", "use_cache"}
"""Fields that do not change the logits. transformers refuses null for some of them."""
IDS = torch.arange(5, 29)


@pytest.fixture(scope="module")
def manager() -> PluginManager:
    """Return one plugin manager for all tests of the module."""
    return PluginManager.load()


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return a checkpoint and the fields of its config.json."""
    path = tiny_checkpoint(request.param, tmp_path_factory.mktemp(request.param), **FAMILIES[request.param])
    raw = json.loads((path / "config.json").read_text())
    raw = {key: value for key, value in raw.items() if key not in ("rope_parameters", "layer_types")}
    if "num_local_experts" in raw:
        raw["num_experts"] = raw.pop("num_local_experts")
    return path, {**raw, **COMMON}


def reference(path: Path) -> torch.Tensor | None:
    """Return the logits of transformers, or None if it refuses config.json or the weights."""
    try:
        options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
        model = transformers.AutoModelForCausalLM.from_pretrained(path, **options)
        with torch.inference_mode():
            logits: torch.Tensor = model(IDS[None], use_cache=False).logits[0]
        return logits
    except Exception:  # validation errors of several libraries, KeyError, RuntimeError
        return None


def check(path: Path, manager: PluginManager) -> bool:
    """Check that the model equals transformers or is refused; return whether it is served."""
    want = reference(path)
    try:
        model = PagedModel(path, max_seq_len=32, max_running_requests=1, manager=manager)
    except ConfigError:
        return False
    assert want is not None, "transformers refuses this config.json, but minisgl serves it"
    (got,) = model.run([(0, 0, IDS)])
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
    return True


@pytest.mark.parametrize("null", [False, True], ids=["missing", "null"])
def test_each_field(family: tuple[Path, dict[str, Any]], null: bool, manager: PluginManager) -> None:
    path, raw = family
    refused = set()
    for key in sorted(raw.keys() - UNREAD - {"model_type"}):
        changed = {k: v for k, v in raw.items() if k != key} | ({key: None} if null else {})
        (path / "config.json").write_text(json.dumps(changed))
        try:
            served = check(path, manager)
        except AssertionError as error:
            raise AssertionError(f"{key}: {error}") from None
        refused |= set() if served else {key}
    assert refused >= REQUIRED
    if not null:
        # The tiny sizes are not the defaults, so without them the tensors have other shapes.
        assert refused - REQUIRED <= SHAPES


def test_head_counts_may_be_null(tmp_path: Path, manager: PluginManager) -> None:
    """``num_key_value_heads`` null means as many as query heads, as in configurations that came before GQA."""
    path = tiny_checkpoint("llama", tmp_path, num_key_value_heads=4)
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**raw, "num_key_value_heads": None, "head_dim": None}))
    assert check(path, manager)


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("mistral", {"sliding_window": 5, "use_sliding_window": False}),  # not a field of Mistral
        ("mistral", {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]}),  # Ministral
        ("mistral", {"sliding_window": None, "attention_bias": True}),  # not a field either
        ("llama", {"sliding_window": 5}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}),
        ("qwen2", {"layer_types": ["sliding_attention", "full_attention"], **WINDOWS}),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 9}),
        ("qwen3_moe", {"num_experts": 4, "num_local_experts": 8}),
    ],
)
def test_fields_of_other_families(
    architecture: str, fields: dict[str, Any], tmp_path: Path, manager: PluginManager
) -> None:
    """A field means the same as in transformers, which ignores some of them for some architectures."""
    path = tiny_checkpoint(architecture, tmp_path)
    raw = json.loads((path / "config.json").read_text())
    raw.pop("layer_types", None)
    (path / "config.json").write_text(json.dumps({**raw, **fields}))
    assert check(path, manager)


def test_layer_types_without_a_window(tmp_path: Path, manager: PluginManager) -> None:
    path = tiny_checkpoint("qwen3", tmp_path)
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**raw, "layer_types": ["sliding_attention"] * 2}))
    with pytest.raises(ConfigError, match="layer 0 a sliding window, but"):
        PagedModel(path, manager=manager)

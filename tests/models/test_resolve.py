"""The ``model`` option: shipped names, directories, the Hugging Face cache, and the errors for unknown names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import huggingface_hub.constants
import pytest

from minisgl.config import ConfigError
from minisgl.models.config import ModelConfig
from minisgl.models.resolve import resolve_model, warn_of_same_name
from minisgl.models.shipped import weights_dir
from minisgl.plugin_manager.manager import PluginManager
from minisgl.testing.checkpoints import tiny_checkpoint

QWEN3 = {  # as published: hidden size, layers, query heads, KV heads, intermediate size, tied embeddings
    "qwen3-0.6b": (1024, 28, 16, 8, 3072, True),
    "qwen3-8b": (4096, 36, 32, 8, 12288, False),
    "qwen3-14b": (5120, 40, 40, 8, 17408, False),
    "qwen3-32b": (5120, 64, 64, 8, 25600, False),
    "qwen3-30b-a3b": (2048, 48, 32, 4, 6144, False),
}


@pytest.mark.parametrize("name", QWEN3)
def test_named_shapes(name: str) -> None:
    path = resolve_model(name)
    assert path.suffix == ".json"
    c = ModelConfig.from_dir(path)
    shape = (c.hidden_size, c.num_hidden_layers, c.num_attention_heads, c.num_key_value_heads, c.intermediate_size)
    assert (*shape, c.tie_word_embeddings) == QWEN3[name]
    assert (c.vocab_size, c.max_position_embeddings, c.rope.rope_theta, c.rms_norm_eps, c.head_dim) == (
        151_936, 40_960, 1e6, 1e-6, 128,
    )  # fmt: skip
    assert c.dtype == "bfloat16"
    assert not c.attention_bias
    assert c.architecture in PluginManager.load().models()
    if name == "qwen3-30b-a3b":
        raw = c.raw
        assert (c.num_experts, raw["moe_intermediate_size"], raw["num_experts_per_tok"]) == (128, 768, 8)
        assert raw["norm_topk_prob"]


@pytest.mark.parametrize(("name", "experts"), [("gpt-oss-20b", (32, 4)), ("qwen3.5-35b-a3b", (256, 8))])
def test_named_shapes_of_other_families(name: str, experts: tuple[int, int]) -> None:
    manager = PluginManager.load()
    manager.load_all("models")
    c = ModelConfig.from_dir(resolve_model(name), manager.hook.minisgl_read_config)
    assert c.architecture in manager.models()
    assert (c.num_experts, c.raw["num_experts_per_tok"]) == experts


def test_a_directory_or_a_config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_checkpoint("llama", tmp_path / "mine")
    assert resolve_model(str(path)) == path.resolve()
    assert resolve_model(str(path / "config.json")) == (path / "config.json").resolve()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("mine") == path.resolve()


@pytest.mark.parametrize("files", [(), ("notes.txt",), ("config.json",)])
def test_a_directory_with_the_name_of_a_shipped_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, files: tuple[str, ...]
) -> None:
    """The shipped model wins. A model's directory of that name is chosen with a slash, which a warning says."""
    (tmp_path / "tutor").mkdir()
    for file in files:
        (tmp_path / "tutor" / file).write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("tutor") == weights_dir("tutor")
    warn_of_same_name("tutor")
    warn_of_same_name("./tutor")
    if "config.json" in files:
        assert resolve_model("./tutor") == tmp_path / "tutor"
        assert "model=./tutor" in caplog.text and len(caplog.records) == 1
    else:
        assert not caplog.records


def test_a_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        resolve_model(str(tmp_path))


def test_unknown_name() -> None:
    with pytest.raises(ConfigError, match=r"qwen3-06b.*qwen3-30b-a3b.*Did you mean qwen3-0\.6b\?"):
        resolve_model("qwen3-06b")


def hub_cache(cache: Path, monkeypatch: pytest.MonkeyPatch, **options: str) -> Path:
    """Create a Hugging Face cache with a snapshot of org/tiny, make the hub offline, and return the snapshot's path."""
    repo = cache / "models--org--tiny"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("abc123")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tiny_checkpoint("llama", repo / "snapshots" / "abc123", **options)


def test_cached_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = hub_cache(tmp_path, monkeypatch)
    assert resolve_model("org/tiny").resolve() == snapshot.resolve()


@pytest.mark.parametrize("victim", ["config.json", "model-00002*.safetensors"])
def test_incomplete_snapshot(victim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = hub_cache(tmp_path, monkeypatch, max_shard_size="60KB")
    next(snapshot.glob(victim)).unlink()
    with pytest.raises(ConfigError, match=r"org/tiny.*cache has no complete copy, and downloading it failed"):
        resolve_model("org/tiny")


def test_tutor_ships() -> None:
    assert resolve_model("tutor") == weights_dir("tutor")
    assert (weights_dir("tutor") / "model.safetensors").is_file()


@pytest.mark.parametrize("name", ["qwen3-8b", str(weights_dir("tutor"))])
def test_resolve_imports_no_torch(name: str) -> None:
    """Neither for a shipped model nor for a path, for which the plugins that find models are imported."""
    code = f"import sys; from minisgl.models.resolve import resolve_model; resolve_model({name!r}); "
    code += "sys.exit('torch._C' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0

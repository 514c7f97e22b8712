"""Which files of a directory are loaded, compared with transformers; the rest is refused by name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from minisgl.config import Config, ConfigError
from minisgl.distributed import Communicator
from minisgl.engine import setup
from minisgl.layers import Context
from minisgl.models.resolve import resolve_model, weight_files
from minisgl.plugin_manager.manager import PluginManager
from minisgl.testing.checkpoints import tiny_checkpoint
from minisgl.testing.oracle import Oracle
from minisgl.testing.paged import PagedModel
from minisgl.testing.ranks import run_ranks

IDS = torch.arange(10, 30)
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def manager() -> PluginManager:
    """Return one plugin manager for all tests of the module."""
    return PluginManager.load()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two checkpoints of one shape and different weights: ``single`` and ``sharded``."""
    folder = tmp_path_factory.mktemp("models")
    tiny_checkpoint("llama", folder / "single", seed=1, tie_word_embeddings=True)
    tiny_checkpoint("llama", folder / "sharded", seed=2, tie_word_embeddings=True, max_shard_size="60KB")
    return folder


@pytest.fixture(scope="module")
def expected(models: Path) -> dict[str, Tensor]:
    """Return transformers' logits of both checkpoints."""
    return {path.name: Oracle(path, "float32").logits(IDS) for path in models.iterdir()}


def logits(path: Path, manager: PluginManager) -> Tensor:
    return PagedModel(path, manager=manager).run([(0, 0, IDS)])[0]


def link(path: Path, source: Path, *patterns: str) -> None:
    """Link the files of ``source`` that match one of ``patterns`` into ``path``, as the hub's cache does."""
    path.mkdir(exist_ok=True)
    for pattern in patterns:
        for file in source.glob(pattern):
            (path / file.name).symlink_to(file)


def write(name: str, content: dict[str, Tensor]) -> Callable[[Path, Path], None]:
    """Return a function that writes safetensors of the name ``name``."""
    return lambda path, models: save_file(content, path / name)


def single(path: Path, models: Path) -> None:
    link(path, models / "single", SINGLE)


def sharded(path: Path, models: Path) -> None:
    link(path, models / "sharded", "model-*", INDEX)


def stale_index(path: Path, models: Path) -> None:
    link(path, models / "sharded", INDEX)


def only_shards(path: Path, models: Path) -> None:
    link(path, models / "sharded", "model-*")


def without_one(path: Path, models: Path) -> None:
    next(path.glob("model-00002*")).unlink()


def named_in_config(path: Path, models: Path) -> None:
    (path / "other.safetensors").symlink_to(models / "single" / SINGLE)
    set_json(path / "config.json", transformers_weights="other.safetensors")


def broken_link(path: Path, models: Path) -> None:
    (path / SINGLE).symlink_to(models / "nothing")


def variant(path: Path, models: Path) -> None:
    (path / "model.fp16.safetensors").symlink_to(models / "single" / SINGLE)


def empty(name: str) -> Callable[[Path, Path], None]:
    return lambda path, models: (path / name).write_bytes(b"")  # type: ignore[return-value]


def set_json(file: Path, **fields: Any) -> None:
    content = json.loads(file.read_text())
    file.unlink()
    file.write_text(json.dumps({**content, **fields}))


CONSOLIDATED = write("consolidated.safetensors", {"layers.0.attention.wq.weight": torch.zeros(2)})
CONSOLIDATED_PART = write("consolidated-00001-of-00001.safetensors", {"norm.weight": torch.zeros(2)})
ADAPTER = write("adapter_model.safetensors", {"base_model.model.model.layers.0.lora_A.weight": torch.zeros(2)})
VALUE_HEAD = write("value_head.safetensors", {"v_head.summary.weight": torch.zeros(2)})


@pytest.mark.parametrize(
    ("parts", "chosen"),
    [
        ([single], "single"),
        ([sharded], "sharded"),
        ([single, stale_index], "single"),
        ([single, sharded], "single"),
        ([single, CONSOLIDATED, ADAPTER, VALUE_HEAD], "single"),
        ([sharded, CONSOLIDATED, CONSOLIDATED_PART, ADAPTER, VALUE_HEAD], "sharded"),
        ([single, variant], "single"),
        ([sharded, variant], "sharded"),
        ([single, empty("pytorch_model.bin")], "single"),
        ([sharded, empty("pytorch_model.bin")], "sharded"),
        ([sharded, named_in_config], "single"),
        ([sharded, broken_link], "sharded"),
        ([sharded, empty("original.gguf")], "sharded"),
    ],
)
def test_the_files_that_transformers_loads(
    parts: list[Callable[[Path, Path], None]],
    chosen: str,
    models: Path,
    expected: dict[str, Tensor],
    tmp_path: Path,
    manager: PluginManager,
) -> None:
    link(tmp_path, models / chosen, "config.json", "generation_config.json")
    for part in parts:
        part(tmp_path, models)
    assert torch.equal(Oracle(tmp_path, "float32").logits(IDS), expected[chosen])
    torch.testing.assert_close(logits(tmp_path, manager), expected[chosen], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([sharded, without_one], r"lacks files that its index names: model-00002-of-\d+\.safetensors"),
        ([only_shards, without_one], r"has a part of a set of files: it lacks model-00002-of-\d+\.safetensors"),
        ([stale_index], r"lacks files that its index names: model-00001"),
        ([], r"has no \*\.safetensors file\."),
        ([empty("pytorch_model.bin")], r"only pytorch_model\.bin\. Convert them.*save_pretrained"),
        ([empty("training_args.bin")], r"has no \*\.safetensors file\. Download the weights"),
        ([empty("pytorch_model-00001-of-00002.bin")], r"only pytorch_model-00001-of-00002\.bin\. Convert them"),
        ([empty("model.Q4_K_M.gguf")], r"only model\.Q4_K_M\.gguf\..*gguf_file="),
        ([CONSOLIDATED], r"only consolidated\.safetensors\. These are in Mistral's own format"),
        ([ADAPTER], r"only adapter_model\.safetensors\. An adapter is no whole model.*merge_and_unload"),
        ([VALUE_HEAD], r"has no \*\.safetensors file"),
        ([broken_link], r"links to files that do not exist: model\.safetensors\. Download the model again"),
        ([empty(SINGLE)], r"model\.safetensors can't be read as safetensors"),
    ],
)
def test_refused(
    parts: list[Callable[[Path, Path], None]], message: str, models: Path, tmp_path: Path, manager: PluginManager
) -> None:
    link(tmp_path, models / "single", "config.json")
    for part in parts:
        part(tmp_path, models)
    with pytest.raises(ConfigError, match=message):
        PagedModel(tmp_path, manager=manager)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_is_no_index(content: str, models: Path, tmp_path: Path, manager: PluginManager) -> None:
    link(tmp_path, models / "sharded", "config.json", "model-*")
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json"):
        PagedModel(tmp_path, manager=manager)


def test_all_shards_without_an_index(models: Path, tmp_path: Path, manager: PluginManager) -> None:
    """transformers refuses them. Their names say how many there are, and the loader that no tensor is missing."""
    link(tmp_path, models / "sharded", "config.json", "model-*")
    CONSOLIDATED(tmp_path, models)
    assert torch.equal(logits(tmp_path, manager), logits(models / "sharded", manager))


def test_shards_without_an_index_and_without_the_plugin(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ``plugins/sources``, a file or an index is found, and other files are refused."""
    monkeypatch.setattr("minisgl.models.resolve.exists", lambda name: False)
    assert list(weight_files(models / "single")) == [models / "single" / SINGLE]
    assert len(weight_files(models / "sharded")) > 1
    with pytest.raises(
        ConfigError, match=r"neither model\.safetensors nor .*index\.json\. .*plugins\.sources\.unlisted"
    ):
        weight_files(models)


def test_transformers_weights_stays_inside(models: Path, tmp_path: Path, manager: PluginManager) -> None:
    link(tmp_path / "model", models / "single", "config.json", SINGLE)
    link(tmp_path, models / "single", SINGLE)
    set_json(tmp_path / "model" / "config.json", transformers_weights=f"../{SINGLE}")
    with pytest.raises(ConfigError, match="outside of the directory"):
        PagedModel(tmp_path / "model", manager=manager)


def test_an_adapter_without_a_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"no config\.json\. An adapter is no whole model"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "qwen3_moe"])
def test_names_of_a_base_model(architecture: str, tmp_path: Path, manager: PluginManager) -> None:
    """A base model has no ``model.`` before its names; its LM head is the embedding. On one rank and on two."""
    import transformers

    path = tiny_checkpoint(architecture, tmp_path, tie_word_embeddings=True)
    expected = Oracle(path, "float32").logits(IDS)
    whole: Any = transformers.AutoModelForCausalLM.from_pretrained(path)
    whole.model.save_pretrained(path)
    assert "embed_tokens.weight" in load_file(path / SINGLE)
    config = setup.read_model(Config(model=str(path)), manager)[1]
    assert config.architecture.endswith("Model")

    def build(comm: Communicator | None = None) -> Tensor:
        def make(config: Any, ctx: Context) -> Any:
            return manager.models()[config.architecture.replace("Model", "ForCausalLM")](config, ctx)

        return PagedModel(path, comm=comm, manager=manager, model=make).run([(0, 0, IDS)])[0]

    for got in [build(), *run_ranks(2, build, manager)]:
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_a_base_model_is_served(tmp_path: Path) -> None:
    import transformers

    from minisgl import LLM, SamplingParams

    path = tiny_checkpoint("qwen3", tmp_path, tie_word_embeddings=True)
    whole: Any = transformers.AutoModelForCausalLM.from_pretrained(path)
    whole.model.save_pretrained(path)
    with LLM(str(path), overrides=["num_pages=20", "device=cpu"]) as llm:
        (output,) = llm.generate([IDS.tolist()], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    Oracle(path).check(IDS.tolist(), output.token_ids)


def test_a_base_model_without_its_head(tmp_path: Path, manager: PluginManager) -> None:
    """transformers draws a random LM head."""
    path = tiny_checkpoint("llama", tmp_path)
    stored = load_file(path / SINGLE)
    del stored["lm_head.weight"]
    save_file({name.removeprefix("model."): tensor for name, tensor in stored.items()}, path / SINGLE)
    with pytest.raises(ConfigError, match=r"it lacks lm_head\.weight"):
        PagedModel(path, manager=manager)


@pytest.mark.parametrize("both", [False, True])
def test_the_head_of_tied_weights_is_stored(both: bool, tmp_path: Path, manager: PluginManager) -> None:
    """Tools that write a shared tensor once may write either of its names."""
    path = tiny_checkpoint("llama", tmp_path, tie_word_embeddings=True)
    expected = Oracle(path, "float32").logits(IDS)
    stored = load_file(path / SINGLE)
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"]
    if not both:
        del stored["model.embed_tokens.weight"]
    save_file({name: tensor.clone() for name, tensor in stored.items()}, path / SINGLE)
    assert torch.equal(Oracle(path, "float32").logits(IDS), expected)
    torch.testing.assert_close(logits(path, manager), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_stored_dtypes(dtype: torch.dtype, tmp_path: Path, manager: PluginManager) -> None:
    path = tiny_checkpoint("qwen3", tmp_path)
    save_file({name: tensor.to(dtype) for name, tensor in load_file(path / SINGLE).items()}, path / SINGLE)
    expected = Oracle(path, "float32").logits(IDS)
    torch.testing.assert_close(logits(path, manager), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.float8_e5m2])
def test_numbers_that_are_not_weights(dtype: torch.dtype, tmp_path: Path, manager: PluginManager) -> None:
    """Integers are quantised weights, whose scales are elsewhere: they are not copied as numbers."""
    path = tiny_checkpoint("llama", tmp_path)
    stored = load_file(path / SINGLE)
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**stored, name: stored[name].to(dtype)}, path / SINGLE)
    with pytest.raises(
        ConfigError, match=r"up_proj\.weight is stored in (u?int|float8_e5m2).*weights must be in float32"
    ):
        PagedModel(path, manager=manager)


def test_tensors_that_are_not_used(tmp_path: Path, manager: PluginManager) -> None:
    """transformers ignores these too: frequencies of RoPE, which config.json determines, and the value head."""
    path = tiny_checkpoint("llama", tmp_path)
    expected = Oracle(path, "float32").logits(IDS)
    extra = {"model.rotary_emb.inv_freq": torch.ones(8), "model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    extra["v_head.summary.weight"] = torch.ones(1, 64)
    save_file({**load_file(path / SINGLE), **extra}, path / SINGLE)
    assert torch.equal(Oracle(path, "float32").logits(IDS), expected)
    torch.testing.assert_close(logits(path, manager), expected, atol=1e-4, rtol=1e-4)


def test_a_cached_snapshot_of_links(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the hub's cache, a snapshot has links to blobs. Files beside the weights do not make it complete."""
    import huggingface_hub

    snapshot = tmp_path / "models--org--tiny" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--org--tiny" / "refs").mkdir()
    (tmp_path / "models--org--tiny" / "refs" / "main").write_text("abc")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    link(snapshot, models / "single", "config.json")
    for make in (ADAPTER, VALUE_HEAD, CONSOLIDATED):
        make(snapshot, models)
    with pytest.raises(ConfigError, match="no complete copy"):
        resolve_model("org/tiny")
    broken_link(snapshot, models)
    with pytest.raises(ConfigError, match="no complete copy"):
        resolve_model("org/tiny")
    os.unlink(snapshot / SINGLE)
    single(snapshot, models)
    assert resolve_model("org/tiny").resolve() == snapshot.resolve()

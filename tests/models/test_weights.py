"""Loading of weights: each rank reads only its slices, from one file or several; errors name the tensor."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl.config import ConfigError
from minisgl.distributed import Communicator
from minisgl.layers.weight_shards import WeightShard
from minisgl.models.weights import Checkpoint, load_weights
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.models.dummy import Dummy
from minisgl.testing.checkpoints import tiny_checkpoint
from minisgl.testing.paged import PagedModel
from minisgl.testing.ranks import run_ranks

IDS = torch.arange(10, 30)


@pytest.fixture(scope="module")
def manager() -> PluginManager:
    """Return one plugin manager for all tests of the module."""
    return PluginManager.load()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the directory of a random Qwen3 checkpoint."""
    return tiny_checkpoint("qwen3", tmp_path)


def edit(path: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors of model.safetensors; ``__`` in a name stands for a dot, and None removes the tensor."""
    tensors = load_file(path / "model.safetensors")
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, path / "model.safetensors")


def tensor_bytes(path: Path, *parts: str) -> int:
    """Return the total bytes of the tensors whose name contains one of ``parts``, or of all tensors."""
    tensors = load_file(path / "model.safetensors")
    return sum(t.nbytes for name, t in tensors.items() if not parts or any(part in name for part in parts))


def test_one_rank_reads_every_byte_once(path: Path, manager: PluginManager) -> None:
    assert PagedModel(path, manager=manager).bytes_read == tensor_bytes(path)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("stacked", [False, True])
def test_each_rank_reads_only_its_slices(
    architecture: str, stacked: bool, tmp_path: Path, manager: PluginManager
) -> None:
    """Every rank reads all norms and routers; each of two ranks reads half of all other tensors."""
    path = tiny_checkpoint(architecture, tmp_path, fused_experts=stacked)
    shared = tensor_bytes(path, "norm", "mlp.gate.")
    expected = shared + (tensor_bytes(path) - shared) // 2
    assert run_ranks(2, lambda comm: PagedModel(path, comm=comm, manager=manager).bytes_read, manager) == [expected] * 2


def test_copied_kv_heads(tmp_path: Path, manager: PluginManager) -> None:
    path = tiny_checkpoint("qwen3", tmp_path, num_key_value_heads=1)

    def rank(comm: Communicator) -> tuple[torch.Tensor, int]:
        model = PagedModel(path, comm=comm, manager=manager)
        qkv = model.model.layers[0].self_attn.qkv_proj.weight
        return qkv[-64:].clone(), model.bytes_read

    (kv_a, bytes_a), (kv_b, bytes_b) = run_ranks(2, rank, manager)
    assert torch.equal(kv_a, kv_b)
    whole = tensor_bytes(path, "norm", "k_proj", "v_proj")
    assert bytes_a == bytes_b == whole + (tensor_bytes(path) - whole) // 2


def test_several_files_with_an_index(path: Path, tmp_path: Path, manager: PluginManager) -> None:
    sharded = tiny_checkpoint("qwen3", tmp_path / "sharded", max_shard_size="60KB")
    assert len(list(sharded.glob("*.safetensors"))) > 3
    whole, parts = PagedModel(path, manager=manager), PagedModel(sharded, manager=manager)
    assert torch.equal(whole.run([(0, 0, IDS)])[0], parts.run([(0, 0, IDS)])[0])
    assert whole.bytes_read == parts.bytes_read


def test_missing_file(tmp_path: Path, manager: PluginManager) -> None:
    sharded = tiny_checkpoint("qwen3", tmp_path, max_shard_size="60KB")
    victim = sorted(sharded.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(ConfigError, match=f"lacks files that its index names: {victim.name}"):
        Checkpoint(sharded)


def test_tensor_missing_from_a_file(tmp_path: Path) -> None:
    sharded = tiny_checkpoint("qwen3", tmp_path, max_shard_size="60KB")
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.extra.weight"] = content["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"lacks tensors that the index says it has: model\.extra\.weight"):
        Checkpoint(sharded)


def test_missing_and_unknown_tensors(path: Path, manager: PluginManager) -> None:
    edit(path, model__layers__1__self_attn__k_proj__weight=None, model__layers__0__extra__weight=torch.zeros(3))
    with pytest.raises(ConfigError) as error:
        PagedModel(path, manager=manager)
    assert "lacks model.layers.1.self_attn.k_proj.weight" in str(error.value)
    assert "also has model.layers.0.extra.weight" in str(error.value)


def test_unknown_tensor(path: Path, manager: PluginManager) -> None:
    edit(path, model__layers__2__input_layernorm__weight=torch.zeros(64))
    with pytest.raises(ConfigError, match=r"it also has model\.layers\.2\.input_layernorm\.weight"):
        PagedModel(path, manager=manager)


def test_wrong_shape(path: Path, manager: PluginManager) -> None:
    edit(path, model__layers__0__mlp__up_proj__weight=torch.zeros(96, 63))
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.mlp\.up_proj\.weight has shape \[96, 63\].*\[96, 64\]"):
        PagedModel(path, manager=manager)


def test_old_rotary_buffers(path: Path, manager: PluginManager) -> None:
    """The ``inv_freq`` tensors of old checkpoints are ignored."""
    edit(path, model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(16))
    PagedModel(path, manager=manager)


def test_truncated_file(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ConfigError, match=r"model\.safetensors can't be read as safetensors"):
        Checkpoint(path)


def test_directory_without_weights(path: Path) -> None:
    (path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no \*\.safetensors file.*load_format=dummy"):
        Checkpoint(path)


def test_tied_head_in_the_checkpoint(tmp_path: Path, manager: PluginManager) -> None:
    """A checkpoint may store a tied LM head, if it equals the embedding."""
    path = tiny_checkpoint("llama", tmp_path, tie_word_embeddings=True)
    want = PagedModel(path, manager=manager).run([(0, 0, IDS)])[0]
    embedding = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    edit(path, lm_head__weight=embedding.clone())
    assert torch.equal(PagedModel(path, manager=manager).run([(0, 0, IDS)])[0], want)
    edit(path, lm_head__weight=embedding + 1)
    with pytest.raises(ConfigError, match=r"ties lm_head\.weight to model\.embed_tokens\.weight"):
        PagedModel(path, manager=manager)


def test_dtype_conversion(path: Path, manager: PluginManager) -> None:
    model = PagedModel(path, dtype=torch.bfloat16, manager=manager)
    assert {p.dtype for p in model.model.parameters()} == {torch.bfloat16}


def test_dummy_weights(path: Path, manager: PluginManager) -> None:
    """Dummy weights have the documented distribution and are the same every time."""
    model = PagedModel(path, source=Dummy(), manager=manager).model
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert torch.all(parameter == 1)
        else:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.1), name
            assert parameter.mean().item() == pytest.approx(0, abs=0.002), name
    same = PagedModel(path, source=Dummy(), manager=manager).model
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), same.parameters(), strict=True))


def test_a_converted_weight_is_freed() -> None:
    """A layer that converts its weight in `after_load` frees it: no two layers have both tensors at once."""
    alive: list[weakref.ref[torch.Tensor]] = []

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight: torch.nn.Parameter | None = torch.nn.Parameter(torch.empty(4, 3), requires_grad=False)
            self.converted: torch.Tensor | None = None

        def weight_shards(self, prefix: str, names: frozenset[str] | None) -> Iterator[WeightShard]:
            assert self.weight is not None
            yield WeightShard.part(f"{prefix}weight", (8, 3), 0, 0, self.weight[:2])
            yield WeightShard.part(f"{prefix}weight", (8, 3), 0, 4, self.weight[2:])

        def after_load(self) -> None:
            assert self.weight is not None
            assert not any(each() is not None for each in alive)
            alive.append(weakref.ref(self.weight))
            self.converted, self.weight = self.weight + 1, None

    model = torch.nn.Sequential(Layer(), Layer())
    load_weights(model, Dummy())
    assert len(alive) == 2

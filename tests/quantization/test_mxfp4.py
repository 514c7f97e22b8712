"""Experts in MXFP4, as gpt-oss's checkpoints store them: the logits are those of transformers' dequantisation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from minisgl.config import ConfigError
from minisgl.distributed import Communicator
from minisgl.plugins.quantization.mx.fp4 import dequantize
from minisgl.testing.checkpoints import tiny_checkpoint
from minisgl.testing.oracle import Oracle
from minisgl.testing.paged import PagedModel
from minisgl.testing.ranks import run_ranks

IDS = torch.arange(5, 45)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """Return a checkpoint with experts in MXFP4, and transformers' logits for the same experts in float32."""
    path = tiny_checkpoint("gpt_oss", tmp_path_factory.mktemp("mxfp4"))
    file, generator = path / "model.safetensors", torch.Generator().manual_seed(0)
    packed, wide = {}, {}
    for name, tensor in load_file(file).items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            packed[name] = wide[name] = tensor
            continue
        experts, size_in, size_out = tensor.shape
        shape = (experts, size_out, size_in // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 125, shape, generator=generator, dtype=torch.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        wide[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(wide, file, metadata={"format": "pt"})
    want = Oracle(path, "float32").logits(IDS)
    save_file(packed, file, metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (path / "config.json").write_text(json.dumps(config))
    return path, want


def test_numbers() -> None:
    """Each code with each exponent that float32 can have."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(1, 15, 1)
    scales = torch.arange(7, 247, dtype=torch.uint8).view(1, 240)
    theirs = convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.float32)[0].t()
    assert torch.equal(dequantize(blocks, scales), theirs)


def test_logits(made: tuple[Path, torch.Tensor]) -> None:
    path, want = made
    (got,) = PagedModel(path, max_seq_len=48, max_running_requests=1).run([(0, 0, IDS)])
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


def test_ranks(made: tuple[Path, torch.Tensor]) -> None:
    """With four ranks, each has 16 columns of a down projection: half of a block."""
    path, want = made

    def work(comm: Communicator) -> torch.Tensor:
        return PagedModel(path, max_seq_len=48, max_running_requests=1, comm=comm).run([(0, 0, IDS)])[0]

    for got in run_ranks(4, work):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


def test_refused(made: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    """Scales of another shape, or blocks without scales."""
    path, _ = made
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    stored = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    save_file({**stored, name: stored[name][:, :, :1].contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"blocks or scales of the tensor \S+experts\.down_proj have"):
        PagedModel(tmp_path)
    del stored[name]
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"lacks \S+experts\.down_proj and also has .*_blocks"):
        PagedModel(tmp_path)

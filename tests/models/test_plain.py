"""The plain decoder layer computes and stores the same as the engine's decoder layer, in every layer of two models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from minisgl.models.decoder import DecoderLayer
from minisgl.models.plain import plain_decoder_layer
from minisgl.models.shipped import weights_dir
from minisgl.testing.checkpoints import tiny_checkpoint
from minisgl.testing.paged import PagedModel

CLOSE: dict[str, Any] = {"atol": 1e-4, "rtol": 1e-5}  # float32 rounding: the sums are taken in another order
PROMPTS = torch.randint(5, 300, (2, 40), generator=torch.Generator().manual_seed(3))


class Comparison:
    """Hooks on a model's decoder layers that run the plain layer after each of them, on the same inputs.

    ``positions`` must hold the positions of the step's tokens before the step runs. ``compared`` lists the numbers of
    the layers that were compared so far.
    """

    def __init__(self, model: PagedModel):
        self.model = model
        self.positions = torch.empty(0)
        self.compared: list[int] = []
        self._stream: Tensor | None = None
        for module in model.model.modules():  # type: ignore[attr-defined]
            if isinstance(module, DecoderLayer):
                module.register_forward_pre_hook(self._before)
                module.register_forward_hook(self._after)

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Keep a copy of the residual stream: the engine's layer may overwrite its input."""
        x, residual = args[:2]
        self._stream = x.clone() if residual is None else x + residual

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Run the plain layer on an emptied KV location of each token; compare residual stream, keys and values."""
        assert isinstance(module, DecoderLayer)
        assert self._stream is not None
        spec, pool, out_cache_loc = module.self_attn.spec, self.model.pool, args[3]
        at = (out_cache_loc // pool.page_size, out_cache_loc % pool.page_size)
        stored = [buffer[at].clone() for buffer in pool.layer(spec.index)]  # keys, values
        for buffer in pool.layer(spec.index):
            buffer[at] = float("nan")
        got = plain_decoder_layer(
            dict(module.named_parameters()),
            spec,
            self.model.config,
            self._stream,
            self.positions,
            out_cache_loc,
            pool,
            self.model.attention,
        )
        torch.testing.assert_close(got, output[0] + output[1], **CLOSE)
        for buffer, want in zip(pool.layer(spec.index), stored, strict=True):
            torch.testing.assert_close(buffer[at], want, **CLOSE)
        self.compared.append(spec.index)


def check(path: Path) -> None:
    """Compare all layers in a prefill step of two requests, a step that mixes decode and prefill, and a decode step."""
    model = PagedModel(path, page_size=4, max_seq_len=48)
    comparison = Comparison(model)
    a, b = PROMPTS
    comparison.positions = torch.cat((torch.arange(30), torch.arange(17)))
    model.run([(0, 0, a[:30]), (1, 0, b[:17])])
    comparison.positions = torch.cat((torch.tensor([30]), torch.arange(17, 26)))
    model.run([(0, 30, a[30:31]), (1, 17, b[17:26])])
    comparison.positions = torch.tensor([31, 26])
    model.run([(0, 31, a[31:32]), (1, 26, b[26:27])])
    assert comparison.compared == [*range(model.config.num_hidden_layers)] * 3


def test_tutor() -> None:
    """Qwen3 with the weights that ship: QK-norm, no biases."""
    check(weights_dir("tutor"))


@pytest.mark.parametrize("biases", [False, True])
def test_llama(biases: bool, tmp_path: Path) -> None:
    """No QK-norm, with and without biases in all projections."""
    check(tiny_checkpoint("llama", tmp_path, attention_bias=biases, mlp_bias=biases))

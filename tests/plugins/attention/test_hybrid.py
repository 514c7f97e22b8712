"""Tests of attention=hybrid and attention=auto: the results, and which backend gets which rows."""

from __future__ import annotations

import pytest
import torch

from minisgl.config import ConfigError
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.attention.auto import Auto, AutoBackend
from minisgl.plugins.attention.hybrid import Hybrid, HybridBackend
from minisgl.plugins.attention.torch import Torch, TorchAttention
from minisgl.testing.attention import CASES, AttentionCase, run_case

CPU = torch.device("cpu")


class Counting(TorchAttention):
    """Backend that counts the query tokens that it computes."""

    def __init__(self) -> None:
        super().__init__(Torch(), CPU)
        self.tokens = 0

    def forward(self, layer, q, out):  # type: ignore[no-untyped-def]
        self.tokens += len(q)
        return super().forward(layer, q, out)


@pytest.mark.parametrize("case", [c for c in CASES if c.dtype == torch.float32], ids=str)
def test_hybrid_splits_rows(case: AttentionCase) -> None:
    """attention=hybrid passes decode rows to the decode backend and prefill chunks to the prefill backend."""
    prefill, decode = Counting(), Counting()
    got, want = run_case(HybridBackend(prefill, decode), case)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-6)
    first_long = next((i for i, (_, count) in enumerate(case.rows) if count > 1), len(case.rows))
    calls = (prefill.tokens + decode.tokens) // sum(count for _, count in case.rows)
    assert decode.tokens == calls * first_long
    assert prefill.tokens == calls * sum(count for _, count in case.rows[first_long:])


def test_hybrid_is_built_from_names() -> None:
    """attention=hybrid builds its two backends from their names."""
    backend = PluginManager.load().build("attention", Hybrid(prefill="torch", decode="torch"), device=CPU)
    assert isinstance(backend, HybridBackend)
    assert not backend.needs().refuse


def test_hybrid_does_not_nest() -> None:
    """attention=hybrid refuses ``auto`` and ``hybrid`` as its prefill or decode backend."""
    with pytest.raises(ConfigError, match=r"attention\.decode can't be auto"):
        PluginManager.load().build("attention", Hybrid(decode="auto"), device=CPU)


def test_hybrid_refuses_if_a_part_refuses() -> None:
    """If one backend of attention=hybrid cannot run on the device, `needs` gives that backend's reason."""
    backend = PluginManager.load().build("attention", Hybrid(prefill="flashinfer", decode="torch"), device=CPU)
    assert "CUDA" in backend.needs().refuse


def test_auto_on_cpu() -> None:
    """On a CPU, attention=auto selects attention=cpp for float32, or attention=sparse without a compiler."""
    backend = PluginManager.load().build("attention", Auto(), device=CPU)
    assert isinstance(backend, AutoBackend)
    assert not backend.needs().refuse
    got, want = run_case(backend, CASES[0])
    torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-6)
    assert backend.chosen in ("cpp", "sparse")

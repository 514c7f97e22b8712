"""A first start in FP8: one product serves until another one is compiled, and recordings follow the change."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl import LLM, SamplingParams
from minisgl.plugins.fp8_gemm.auto import Auto, AutoFp8Gemm
from minisgl.plugins.fp8_gemm.torch import TorchFp8Gemm
from minisgl.plugins.kernels.ops import compilations, fp8_behind
from minisgl.plugins.kernels.ops.fp8 import Fp8Weight, QuantizedRows
from minisgl.plugins.kernels.ops.fp8_behind import Behind, ChangingFp8Gemm

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


class Product(TorchFp8Gemm):
    """Counts the products that Python computes: with recorded steps, those of the recordings."""

    def __init__(self) -> None:
        self.calls = 0

    def forward(self, weight: Fp8Weight, x: torch.Tensor | QuantizedRows) -> torch.Tensor:
        self.calls += 1
        return super().forward(weight, x)


class Slow(Product):
    """A product that is prepared when a test says so: a `SlowFp8Gemm`, and its own `Preparation`."""

    def __init__(self, on_disk: bool = False) -> None:
        super().__init__()
        self.on_disk, self.events, self.ready = on_disk, list[str](), False

    def prepare(self, weights: Sequence[Fp8Weight], rows: int) -> None:
        self.events.append("prepare")

    def is_prepared(self, weights: Sequence[Fp8Weight], rows: int) -> bool:
        return self.on_disk

    def prepare_behind(self, weights: Sequence[Fp8Weight], rows: int) -> Slow:
        self.events.append(f"behind {len(weights)} {rows}")
        return self

    def begin_loading(self) -> None:
        self.events.append("load")

    def done(self) -> bool:
        return self.ready

    def close(self) -> None:
        self.events.append("close")


def serving(monkeypatch: pytest.MonkeyPatch, slow: Slow, *, behind: bool = True) -> tuple[LLM, Product]:
    """Return an engine whose products have a first, quick backend for all numbers of rows, and a slow one."""
    quick = Product()

    def build(self: Auto) -> AutoFp8Gemm:
        return AutoFp8Gemm([TorchFp8Gemm()], [ChangingFp8Gemm(quick, slow, self.behind)])

    monkeypatch.setattr(Auto, "build", build)
    options = ["device=cpu", "quantize=fp8", "num_pages=64", "page_size=16", "max_running_requests=4"]
    options += ["graph=simulated", "graph.max_rows=4", "graph.max_tokens=64", "max_prefill_tokens=64"]
    return LLM("tutor", overrides=[*options, f"fp8_gemm.behind={str(behind).lower()}"]), quick


def test_steps_change_the_product_and_record_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before the change only the first product is computed, after it only the other; each bucket is recorded once."""
    caplog.set_level(logging.INFO)
    slow = Slow()
    llm, quick = serving(monkeypatch, slow)
    with llm:
        matrices = 4 * len(llm.engine.model.layers)
        assert slow.events == [f"behind {matrices} 64", "load"]
        prompts = [[5, 6, 7], [8] * 40, [9, 10]]
        expected = [output.token_ids for output in llm.generate(prompts, GREEDY, progress=False)]
        assert (slow.calls, quick.calls > 0) == (0, True)
        before = quick.calls
        slow.ready = True
        for _ in range(2):
            outputs = llm.generate(prompts, GREEDY, progress=False)
            assert [output.token_ids for output in outputs] == expected
        assert quick.calls == before
        used = slow.calls
        assert used and used % matrices == 0
        assert used // matrices <= len(llm.engine.runner.runner.graph.graphs)  # and not once for each step
        llm.generate(prompts, GREEDY, progress=False)
        assert slow.calls == used
    assert slow.events[2:] == ["close"]
    assert caplog.text.count("changed to FlashInfer's FP8 product") == 1


@pytest.mark.parametrize(("on_disk", "behind"), [(True, True), (False, False)])
def test_kernels_on_disk_are_used_at_once(on_disk: bool, behind: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """So they are with fp8_gemm.behind=false, which compiles them first; no runner is wrapped."""
    slow = Slow(on_disk)
    llm, quick = serving(monkeypatch, slow, behind=behind)
    with llm:
        llm.generate([[5, 6, 7]], GREEDY, progress=False)
        assert not hasattr(llm.engine.runner, "gemm")
    assert (slow.events, quick.calls, slow.calls > 0) == (["prepare"], 0, True)


def test_a_failed_compilation_leaves_the_first_product(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(fp8_behind, "compile_kernels", fail)
    behind = Behind(fail, [Fp8Weight(torch.zeros(128, 128), torch.zeros(1, 1))], 4)  # type: ignore[arg-type]
    behind.begin_loading()
    behind.close()
    assert not behind.done()
    assert "Triton's stays: RuntimeError: out of memory" in caplog.text


def test_nothing_is_loaded_before_the_engine_has_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """While a graph is recorded, no thread may allocate memory of the device. No step waits for what is compiled."""
    done: list[str] = []

    def add(what: str) -> None:
        (tmp_path / "cache" / f"{what} {len(done)}").mkdir(parents=True)
        (tmp_path / "cache" / f"{what} {len(done)}" / "kernel.cubin").touch()
        done.append(what)

    monkeypatch.setenv("TRTLLM_DG_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compilations, "_uses_deep_gemm", lambda: True)
    monkeypatch.setattr(fp8_behind, "compile_kernels", lambda *arguments: add("compiled"))
    monkeypatch.setattr(fp8_behind, "prepare", lambda *arguments: add("loaded"))
    count = compilations.Compilations()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    weights = [Fp8Weight(torch.zeros(128, 128), torch.zeros(1, 1))]
    waiting = Behind(print, weights, 4)  # type: ignore[arg-type]
    waiting.close()  # without begin_loading
    assert (done, waiting.done()) == (["compiled"], False)
    loading = Behind(print, weights, 4)  # type: ignore[arg-type]
    loading.begin_loading()
    loading._thread.join()
    assert (done[1:], loading.done()) == (["compiled", "loaded"], True)
    assert (compilations.deep_gemm_kernels(), count.counts()["deep_gemm"]) == (3, 0)

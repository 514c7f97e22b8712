"""The count of kernels that were compiled after the start, with libraries that only look like the real ones.

tests/gpu/test_warmup.py counts real kernels.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from minisgl.plugins.kernels.ops.compilations import Compilations, deep_gemm_kernels, on_purpose


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """Replace Triton, FlashInfer and FlashAttention by modules in which a test can plant a compilation."""
    monkeypatch.setenv("TRTLLM_DG_CACHE_DIR", str(tmp_path))
    loaded = [0]  # whether the FP8 product is loaded
    runtime = SimpleNamespace(jit_post_compile_hook=None)
    specs: dict[str, Any] = {"old": None}
    cache = {"old": None}
    made = {
        "triton": SimpleNamespace(knobs=SimpleNamespace(runtime=runtime)),
        "flashinfer.jit.core": SimpleNamespace(jit_spec_registry=SimpleNamespace(get_all_specs=lambda: dict(specs))),
        "flashinfer.gemm.gemm_base": SimpleNamespace(
            get_fp8_blockscale_gemm_runner_sm90=SimpleNamespace(cache_info=lambda: SimpleNamespace(currsize=loaded[0]))
        ),
        "flash_attn.cute.interface": SimpleNamespace(
            _flash_attn_fwd=SimpleNamespace(compile_cache=SimpleNamespace(cache=cache))
        ),
    }
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)

    def compile_triton(name: str) -> Any:
        return runtime.jit_post_compile_hook(fn=SimpleNamespace(name=name), repr="")

    def compile_deep_gemm(name: str) -> None:
        (tmp_path / "cache" / name).mkdir(parents=True)
        (tmp_path / "cache" / name / "nvcc_kernel.cubin").touch()

    return SimpleNamespace(
        runtime=runtime,
        specs=specs,
        cache=cache,
        loaded=loaded,
        compile_triton=compile_triton,
        compile_deep_gemm=compile_deep_gemm,
    )


def test_late_compilations_are_counted(libraries: SimpleNamespace) -> None:
    libraries.loaded[0] = 1
    libraries.compile_deep_gemm("early")
    count = Compilations()
    assert count.counts() == {"triton": 0, "flashinfer": 0, "cute": 0, "deep_gemm": 0}
    libraries.compile_triton("kernels.late_kernel")
    libraries.specs["new"] = None
    libraries.cache["new"] = None
    libraries.compile_deep_gemm("late")
    assert count.counts() == {"triton": 1, "flashinfer": 1, "cute": 1, "deep_gemm": 1}
    assert count.triton == ["late_kernel"]
    (family,) = text_string_to_metric_families(count.metrics())
    assert family.type == "counter"
    assert {sample.labels["compiler"]: sample.value for sample in family.samples} == count.counts()


def test_deep_gemm_counts_only_if_this_process_uses_it(libraries: SimpleNamespace) -> None:
    """A folder on disk is shared with other processes; a kernel that was begun but not finished does not count."""
    count = Compilations()
    libraries.compile_deep_gemm("another process")
    assert count.counts()["deep_gemm"] == 0
    assert deep_gemm_kernels() == 1
    second = Compilations()
    libraries.loaded[0] = 1  # a second engine, with an FP8 model: its kernels that are on disk are not late
    assert (count.counts()["deep_gemm"], second.counts()["deep_gemm"]) == (1, 0)
    (Path(os.environ["TRTLLM_DG_CACHE_DIR"]) / "cache" / "unfinished").mkdir()
    assert deep_gemm_kernels() == 1


def test_what_is_compiled_on_purpose_is_not_late(libraries: SimpleNamespace) -> None:
    """Neither meanwhile nor afterwards, also if two engines compile at once or an error ends it."""
    libraries.loaded[0] = 1
    count = Compilations()
    with suppress(RuntimeError), on_purpose("deep_gemm"):
        libraries.compile_deep_gemm("one")
        with on_purpose("deep_gemm"), on_purpose("flashinfer"):
            libraries.specs["product"] = None
            libraries.compile_deep_gemm("two")
        libraries.compile_deep_gemm("three")
        assert set(count.counts().values()) == {0}
        second = Compilations()
        libraries.specs["another"] = None
        raise RuntimeError
    for each in (count, second):
        assert each.counts() == {"triton": 0, "flashinfer": 1, "cute": 0, "deep_gemm": 0}
    libraries.compile_deep_gemm("late")
    assert (count.counts()["deep_gemm"], second.counts()["deep_gemm"]) == (1, 1)


def test_each_count_begins_when_it_is_made(libraries: SimpleNamespace) -> None:
    first = Compilations()
    libraries.compile_triton("one")
    second = Compilations()
    libraries.compile_triton("two")
    assert (first.triton, second.triton) == (["one", "two"], ["two"])


def test_a_hook_that_was_set_before_is_still_called(libraries: SimpleNamespace) -> None:
    calls: list[str] = []
    libraries.runtime.jit_post_compile_hook = lambda **compiled: calls.append(compiled["fn"].name)
    Compilations()
    libraries.compile_triton("a_kernel")
    assert calls == ["a_kernel"]


def test_without_the_libraries_nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("triton", "flashinfer.jit.core", "flash_attn.cute.interface"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert set(Compilations().counts().values()) == {0}

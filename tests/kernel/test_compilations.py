"""The count of kernels that were compiled after the start, with libraries that only look like the real ones.

tests/gpu/test_warmup.py counts real kernels.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from minisgl.kernel.compilations import Compilations


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replace Triton, FlashInfer and FlashAttention by modules in which a test can plant a compilation."""
    runtime = SimpleNamespace(jit_post_compile_hook=None)
    specs: dict[str, Any] = {"old": None}
    cache = {"old": None}
    made = {
        "triton": SimpleNamespace(knobs=SimpleNamespace(runtime=runtime)),
        "flashinfer.jit.core": SimpleNamespace(jit_spec_registry=SimpleNamespace(get_all_specs=lambda: dict(specs))),
        "flash_attn.cute.interface": SimpleNamespace(
            _flash_attn_fwd=SimpleNamespace(compile_cache=SimpleNamespace(cache=cache))
        ),
    }
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)

    def compile_triton(name: str) -> Any:
        return runtime.jit_post_compile_hook(fn=SimpleNamespace(name=name), repr="")

    return SimpleNamespace(runtime=runtime, specs=specs, cache=cache, compile_triton=compile_triton)


def test_late_compilations_are_counted(libraries: SimpleNamespace) -> None:
    count = Compilations()
    assert count.counts() == {"triton": 0, "flashinfer": 0, "cute": 0}
    libraries.compile_triton("kernels.late_kernel")
    libraries.specs["new"] = None
    libraries.cache["new"] = None
    assert count.counts() == {"triton": 1, "flashinfer": 1, "cute": 1}
    assert count.triton == ["late_kernel"]
    (family,) = text_string_to_metric_families(count.metrics())
    assert family.type == "counter"
    assert {sample.labels["compiler"]: sample.value for sample in family.samples} == count.counts()


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

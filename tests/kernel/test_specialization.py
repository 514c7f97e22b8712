"""Triton kernels are not compiled again for inputs of a step that lie elsewhere in memory."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import importlib, pkgutil
import minisgl.plugins.kernels.ops.triton as package
from triton.runtime.jit import JITFunction

for found in pkgutil.iter_modules(package.__path__):
    module = importlib.import_module(f"{package.__name__}.{found.name}")
    for name, kernel in vars(module).items():
        if isinstance(kernel, JITFunction) and kernel.fn.__module__ == module.__name__ and name.endswith("_kernel"):
            for p in kernel.params:
                print(name, p.name, p.do_not_specialize or p.do_not_specialize_on_alignment)
"""

STEP_INPUTS = {
    "cu_seqlens_q",
    "order",
    "out_cache_loc",
    "positions",
    "req_pool_indices",
    "seq_lens",
    "shared_prefix_len",
    "tiles",
}
"""Arguments that are parts of a larger array. Where they begin depends on the number of tokens or of decode rows."""


def test_step_inputs_may_have_any_alignment() -> None:
    """Triton compiles a variant for pointers that are multiples of 16 bytes, unless the kernel says otherwise."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    lines = [line.split() for line in run.stdout.splitlines()]
    found = [(kernel, name, free) for kernel, name, free in lines if name in STEP_INPUTS]
    assert {name for _, name, _ in found} == STEP_INPUTS
    assert [(kernel, name) for kernel, name, free in found if free != "True"] == []

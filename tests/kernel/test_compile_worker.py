"""A worker compiles a kernel for a GPU that this machine may lack, and tells of requests that it can't serve."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from minisgl.plugins.kernels.ops.compile_worker import Request

pytest.importorskip("triton", reason="Triton is not installed here")

DESCRIBE = """
import torch
from triton import knobs
from minisgl.plugins.kernels.ops.compile_worker import Request, use_target
from minisgl.plugins.kernels.ops.triton.activation import act_and_mul_kernel as kernel

def note(*, fn, compile, **rest):
    print(Request(fn.module, fn.name.rpartition(".")[2], compile["specialization_data"], ("cuda", 90, 32)).encode())
    return True  # neither compile nor launch

use_target(("cuda", 90, 32))
knobs.runtime.jit_cache_hook = note
x = torch.zeros(4, 512, dtype=torch.bfloat16)
options = dict(EARLY=True, launch_pdl=True, num_warps=4)
kernel[(4, 1)](x, x, None, 512, 0, DIM=256, ACT="silu", QUANTIZE=False, BLOCK=256, **options)
"""


def test_a_worker_compiles_into_the_cache_on_disk(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    described = subprocess.run(
        [sys.executable, "-c", DESCRIBE], env=environment, capture_output=True, text=True, check=True
    ).stdout.split("\n")[0]
    request = Request.decode(described)
    missing = replace(request, name="no_such_kernel")
    worker = subprocess.run(
        [sys.executable, "-m", "minisgl.plugins.kernels.ops.compile_worker"],
        input=missing.encode() + "not a request\n" + request.encode() * 2,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    answers = worker.stdout.splitlines()
    assert answers[0].startswith("AttributeError: ") and "no_such_kernel" in answers[0]
    assert answers[1].startswith("JSONDecodeError: ")
    assert answers[2:] == ["ok", "ok"], worker.stderr
    names = [file.name for file in tmp_path.rglob("*.cubin")]
    assert names == ["act_and_mul_kernel.cubin"]
    assert json.loads(request.data)["options"]["launch_pdl"] is True


KEYS = """
import importlib, json, pkgutil, sys
from triton.runtime.jit import JITFunction

kernels = {}
for module in pkgutil.iter_modules(importlib.import_module("minisgl.plugins.kernels.ops.triton").__path__):
    for value in vars(importlib.import_module(f"minisgl.plugins.kernels.ops.triton.{module.name}")).values():
        if isinstance(value, JITFunction):
            kernels[f"{value.__module__}.{value.__name__}"] = value
print(json.dumps({name: kernels[name].cache_key for name in sorted(kernels, reverse=sys.argv[1] == "reversed")}))
"""


def test_cache_keys_do_not_depend_on_the_order_of_use() -> None:
    """Else a kernel that a worker compiled is compiled again: see `minisgl.plugins.kernels.ops.triton.device`."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    keys = [
        json.loads(
            subprocess.run(
                [sys.executable, "-c", KEYS, order], env=environment, capture_output=True, text=True, check=True
            ).stdout
        )
        for order in ("sorted", "reversed")
    ]
    assert len(keys[0]) > 40
    assert keys[0] == keys[1]

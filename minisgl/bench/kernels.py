"""``python -m minisgl.bench kernels``: the time of each kernel on this GPU, next to torch references and libraries.

For each shape the table shows microseconds, GB/s or TFLOP/s, and the share of the chip's limit. The limit follows from
the bytes that must be moved and the operations that must be done, each counted once. Of attention and experts, all
loaded backends that support this GPU are measured.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from minisgl.bench import backends
from minisgl.bench.arguments import add_json, write_json
from minisgl.bench.timing import BF16, Case, Measured, measure, random
from minisgl.config import ConfigError
from minisgl.engine import gumbel
from minisgl.options.compose import plain_errors

VOCABULARY = 151_936  # Qwen3's


def main(argv: Sequence[str]) -> None:
    with plain_errors("minisgl.bench"):
        args = parser().parse_args(argv)
        if not torch.cuda.is_available():
            raise ConfigError("this benchmark needs a GPU, but torch finds no CUDA device.")
        results = []
        for case in cases(args.only):
            results += measure(case)
            for line in results[-len(case.versions) :]:
                print(f"{line.kernel} {line.shape} {line.version}: {line.us or line.note}", flush=True)
        show(results)
        device = torch.cuda.get_device_name()
        report = {"device": device, "torch": torch.__version__, "results": [asdict(line) for line in results]}
        write_json(args, report)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m minisgl.bench kernels", description=__doc__)
    p.add_argument("--only", nargs="+", default=[], help="only kernels whose name begins with one of these words")
    add_json(p)
    return p


def cases(only: Sequence[str] = ()) -> Iterator[Case]:
    """Yield the cases. Each case is built when it is requested, so that its tensors exist only while it is measured."""
    groups: tuple[tuple[str, Callable[[], Iterable[Case]]], ...] = (
        ("add_rms_norm", norms),
        ("silu_and_mul", activations),
        ("gated_linear", projections),
        ("norm_rope_store", ropes),
        ("page_indices", indices),
        ("gumbel_argmax", draws),
        ("softmax_topk", routes),
        ("decode", backends.decodes),
        ("extend", backends.extends),
        ("experts", backends.experts),
    )
    for name, make in groups:
        if not only or any(name.startswith(word) for word in only):
            yield from make()


def show(results: Sequence[Measured]) -> None:
    table = Table("kernel", "shape", "version", title=torch.cuda.get_device_name())
    for name in ("µs", "GB/s", "TFLOP/s", "of the limit"):
        table.add_column(name, justify="right")
    for i, line in enumerate(results):
        new = i == 0 or (line.kernel, line.shape) != (results[i - 1].kernel, results[i - 1].shape)
        numbers = [
            "failed" if line.us is None else f"{line.us:.1f}",
            "" if line.gb_s is None else f"{line.gb_s:.0f}",
            "" if line.tflop_s is None else f"{line.tflop_s:.0f}",
            "" if line.share is None else f"{line.share:.0%}",
        ]
        table.add_row(*(line.kernel, line.shape) if new else ("", ""), line.version, *numbers)
    console = Console(width=120)
    console.print(table)
    for line in results:
        if line.note:
            console.print(f"{line.kernel} {line.shape} {line.version}: {line.note}", markup=False)


# ---- cases -------------------------------------------------------------------------------------------------


def library(path: str) -> Callable[..., Any] | None:
    """Return the function ``package.module:function``, or None if the package is not installed."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


def norms() -> Iterator[Case]:
    from minisgl.plugins.kernels.ops.triton import norm as kernel

    library_kernel = library("flashinfer.norm:fused_add_rmsnorm")
    for rows in (1, 64, 8192):
        for dim in (1024, 5120):
            x, residual, weight = random(rows, dim), random(rows, dim), random(dim)

            case = Case("add_rms_norm", f"{rows} x {dim}", 4 * x.nbytes)
            case.versions["torch"] = partial(norm_reference, x, residual, weight)
            case.versions["triton"] = partial(kernel.add_rms_norm, x, residual, weight, 1e-6)
            if library_kernel is not None:
                case.versions["flashinfer"] = partial(library_kernel, x, residual, weight, 1e-6)
            yield case


def norm_reference(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x.add_(residual), weight.shape, weight, 1e-6)


def activations() -> Iterator[Case]:
    from minisgl.plugins.kernels.ops.triton import activation as kernel

    library_kernel = library("flashinfer.activation:silu_and_mul")
    for rows in (1, 64, 8192):
        x = random(rows, 2 * 3072)
        case = Case("silu_and_mul", f"{rows} x 3072", 1.5 * x.nbytes)
        case.versions["torch"] = partial(silu_reference, x)
        case.versions["triton"] = partial(kernel.silu_and_mul, x)
        if library_kernel is not None:
            case.versions["flashinfer"] = partial(library_kernel, x)
        yield case


def silu_reference(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)


def projections() -> Iterator[Case]:
    from minisgl.plugins.kernels.ops.gated import gated_linear_torch
    from minisgl.plugins.kernels.ops.triton import gated as kernel

    for hidden, inner in ((1024, 3072), (5120, 17408)):
        weight = random(2 * inner, hidden) * 0.02
        for rows in (256, 512, 1024, 2048, 8192):
            x = random(rows, hidden)
            moved = x.nbytes + weight.nbytes + 2 * rows * inner
            case = Case("gated_linear", f"{rows} x {hidden} -> {inner}", moved, 4.0 * rows * hidden * inner)
            case.versions["cuBLAS, then triton"] = partial(gated_linear_torch, x, weight, "silu")
            case.versions["triton"] = partial(kernel.gated_linear, x, weight, "silu")
            yield case


def ropes() -> Iterator[Case]:
    from minisgl.attention import QKNorm
    from minisgl.kvcache.pool import KVPool
    from minisgl.plugins.kernels.attention import references
    from minisgl.plugins.kernels.ops.cpp import rope as cpp
    from minisgl.plugins.kernels.ops.triton import rope as kernel

    q_heads, kv_heads, dim = 16, 8, 128
    norm = QKNorm(random(dim), random(dim), 1e-6)
    for tokens in (1, 64, 8192):
        qkv, cos_sin = random(tokens, (q_heads + 2 * kv_heads) * dim), random(tokens, dim, dtype=torch.float32)
        pool = KVPool(1, tokens // 16 + 2, 16, kv_heads, dim, BF16, torch.device("cuda"))
        out_cache_loc = torch.randperm((tokens // 16 + 2) * 16, device="cuda")[:tokens]
        args = (qkv, q_heads, kv_heads, norm, cos_sin, pool, 0, out_cache_loc)
        case = Case("norm_rope_store", f"{tokens} tokens, 16/8 heads", 2 * qkv.nbytes + cos_sin.nbytes)
        case.versions["torch"] = partial(references.norm_rope_store, *args)
        case.versions["triton"] = partial(kernel.norm_rope_store, *args)
        case.versions["CUDA C++"] = partial(cpp.norm_rope_store, *args)
        yield case


def indices() -> Iterator[Case]:
    from minisgl.plugins.kernels.ops import indices as reference
    from minisgl.plugins.kernels.ops.triton import indices as kernel

    for rows, length, page in ((64, 1024, 16), (256, 1024, 16), (64, 4096, 1)):
        columns = length // page
        page_table = torch.randint(0, 1 << 20, (rows + 1, columns), dtype=torch.int32, device="cuda")
        req_pool_indices = torch.randperm(rows, device="cuda").int()
        seq_lens = torch.full((rows,), length, dtype=torch.int32, device="cuda")
        outs = [torch.empty(n, dtype=torch.int32, device="cuda") for n in (rows + 1, rows * columns, rows)]
        case = Case("page_indices", f"{rows} x {length}, page {page}", 8 * rows * columns)
        case.versions["torch"] = partial(
            reference.page_indices_torch, page_table, req_pool_indices, seq_lens, page, *outs
        )
        case.versions["triton"] = partial(kernel.page_indices, page_table, req_pool_indices, seq_lens, page, *outs)
        yield case


def draws() -> Iterator[Case]:
    from minisgl.plugins.kernels.ops.triton import sampling as kernel

    library_kernel = library("flashinfer.sampling:sampling_from_logits")
    hashes = gumbel.token_hashes(VOCABULARY, torch.device("cuda"))
    for rows in (1, 64, 256):
        logits = random(rows, VOCABULARY, dtype=torch.float32)
        sampling_table = torch.randint(-(1 << 31), (1 << 31) - 1, (rows, 3), dtype=torch.int32, device="cuda")
        sampling_table[:, 2].view(torch.float32).fill_(0.6)
        rows_of_logits = torch.arange(rows, dtype=torch.int32, device="cuda")
        args = (logits, sampling_table, rows_of_logits, rows_of_logits, hashes)
        case = Case("gumbel_argmax", f"{rows} x {VOCABULARY}", logits.nbytes)
        case.versions["torch"] = partial(gumbel.draw, *args)
        case.versions["triton"] = partial(kernel.gumbel_argmax, *args, scaled=True)
        case.versions["argmax alone (torch)"] = partial(logits.argmax, dim=1)
        if library_kernel is not None:
            case.versions["flashinfer"] = partial(library_kernel, logits)
        yield case


def routes() -> Iterator[Case]:
    from minisgl.plugins.kernels.ops import routing
    from minisgl.plugins.kernels.ops.triton import routing as kernel

    for tokens in (1, 64, 8192):
        logits = random(tokens, 128)
        case = Case("softmax_topk", f"{tokens} x 128, top 8", logits.nbytes + 64 * tokens)
        case.versions["torch"] = partial(routing.softmax_topk_torch, logits, 8, True)
        case.versions["triton"] = partial(kernel.softmax_topk, logits, 8, True)
        yield case

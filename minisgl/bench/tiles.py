"""``python -m minisgl.bench tiles``: measures tile shapes of the Triton kernels on this GPU, and prints the fastest.

A developer copies the result into `minisgl.plugins.kernels.ops.triton.attention` (decode_tile, extend_tile),
`minisgl.plugins.kernels.ops.triton.gated` and the table of the MoE plugin.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch

from minisgl.bench.backends import paged
from minisgl.bench.timing import random, time_us
from minisgl.config import ConfigError
from minisgl.options.compose import plain_errors

Variant = tuple[str, Callable[[], Any]]


def main(argv: Sequence[str]) -> None:
    with plain_errors("minisgl.bench"):
        p = argparse.ArgumentParser(prog="python -m minisgl.bench tiles", description=__doc__)
        p.add_argument("kernel", nargs="*", default=[*MAKERS], help=", ".join(MAKERS))
        p.add_argument("--best", type=int, default=4, help="number of tile shapes to print for each kernel shape")
        args = p.parse_args(argv)
        if not torch.cuda.is_available():
            raise ConfigError("this benchmark needs a GPU, but torch finds no CUDA device.")
        for name in args.kernel:
            if name not in MAKERS:
                raise ConfigError(f"{name} is not a kernel: choose among {', '.join(MAKERS)}.")
            for shape, variants in MAKERS[name]():
                show(f"{name}, {shape}", variants, args.best)


def show(title: str, variants: Sequence[Variant], best: int) -> None:
    times = []
    for name, run in variants:
        try:
            times.append((time_us(run), name))
        except Exception as error:  # for example a tile that does not fit into shared memory
            print(f"  {title}: {name}: {type(error).__name__}: {str(error)[:80]}", flush=True)
    for us, name in sorted(times)[:best]:
        print(f"{title}: {us:9.1f} µs  {name}", flush=True)


def decodes() -> Iterator[tuple[str, list[Variant]]]:
    from minisgl.plugins.kernels.ops.triton import attention as kernel

    shapes = ((1, 1024, 16), (1, 16384, 16), (8, 1024, 16), (64, 1024, 16), (64, 1024, 40), (256, 600, 16))
    for rows, length, q_heads in shapes:
        pool, layer, batch = paged([(1, length)] * rows, (q_heads, 8, 128), 16)
        q = random(rows, q_heads, 128)
        pages = kernel.Pages(*pool.layer(0), batch.page_table, batch.req_pool_indices, batch.seq_lens)
        heads = kernel.Heads(q_heads, 8, 128, layer.scale, -1, 0.0)
        order = torch.arange(rows, dtype=torch.int32, device=q.device)
        variants: list[Variant] = []
        for programs, n, warps, stages in product((264, 528, 1056), (32, 64, 128), (2, 4, 8), (2, 3, 4)):
            splits = kernel.decode_splits(rows, 8, programs)
            partial_sums = random(rows * q_heads * splits * 129, dtype=torch.float32)
            tile = kernel.Tile(16, n, warps, stages)
            run = partial(kernel.decode, q, torch.empty_like(q), pages, order, heads, splits, partial_sums, tile)
            variants.append((f"{tile}, {splits} splits", run))
        yield f"{rows} x {length}, {q_heads}/8", list(dict(variants).items())


def extends() -> Iterator[tuple[str, list[Variant]]]:
    from minisgl.plugins.kernels.ops.triton import attention as kernel

    for rows, count, length in ((8, 1024, 1024), (1, 8192, 8192), (128, 64, 2112)):
        pool, layer, batch = paged([(count, length)] * rows, (16, 8, 128), 16)
        q = random(rows * count, 16, 128)
        pages = kernel.Pages(*pool.layer(0), batch.page_table, batch.req_pool_indices, batch.seq_lens)
        heads = kernel.Heads(16, 8, 128, layer.scale, -1, 0.0)
        variants: list[Variant] = []
        for m, n, warps, stages in product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4)):
            per_row = -(-2 * count // m)
            numbers = np.tile(np.arange(per_row)[::-1], rows)
            order = np.argsort(-numbers, kind="stable")
            tiles = np.stack((np.repeat(np.arange(rows), per_row)[order], numbers[order]), axis=1).astype(np.int32)
            on_device, tile = torch.from_numpy(tiles).to(q.device), kernel.Tile(m, n, warps, stages)
            run = partial(kernel.extend, q, torch.empty_like(q), pages, heads, batch.cu_seqlens_q, on_device, tile)
            variants.append((str(tile), run))
        yield f"{rows} x {count} of {length}", variants


def experts() -> Iterator[tuple[str, list[Variant]]]:
    from minisgl.plugins.kernels.ops.triton import moe, moe_tma
    from minisgl.plugins.kernels.ops.triton.align import align

    count, hidden, inner, top_k = 128, 2048, 768, 8
    gate_up, down = random(count, 2 * inner, hidden), random(count, hidden, inner)
    for tokens in (1, 64, 256, 1024, 8192):
        x = random(tokens, hidden)
        scale, ids = torch.rand(tokens, count, device="cuda").topk(top_k)
        ids = ids.int()
        for m in (16, 32, 64, 128):
            if not m // 4 <= tokens * top_k / count <= 8 * m and not (m == 16 and tokens < 64):
                continue
            pairs, owner = align(ids, 0, count, m)
            ups: list[Variant] = []
            downs: list[Variant] = []
            for (name, kernel, h), n, k, warps, stages in product(
                (("", moe, random(tokens * top_k, inner)), (", TMA", moe_tma, random(len(pairs), inner))),
                (32, 64, 128, 256), (64, 128), (4, 8), (3, 4),
            ):  # fmt: skip
                tiles = moe.Tiles(m, n, k, warps, stages)
                if n <= 128:
                    run = partial(kernel.up, x, gate_up, pairs, owner, top_k, "silu", tiles)
                    ups.append((f"{tiles}{name}", run))
                downs.append((f"{tiles}{name}", partial(kernel.down, h, down, scale, pairs, owner, tiles)))
            yield f"first product, {tokens} tokens, m {m}", ups
            yield f"second product, {tokens} tokens, m {m}", downs


def gated() -> Iterator[tuple[str, list[Variant]]]:
    from minisgl.plugins.kernels.ops.gated import gated_linear_torch
    from minisgl.plugins.kernels.ops.triton import gated as kernel

    for hidden, inner in ((1024, 3072), (5120, 17408)):
        weight = random(2 * inner, hidden) * 0.02
        for rows in (512, 1024, 8192):
            x = random(rows, hidden)
            variants: list[Variant] = [("separate activation", partial(gated_linear_torch, x, weight, "silu"))]
            for (m, n), group, stages in product(((128, 128), (128, 64), (64, 128)), (4, 8, 16), (3, 4)):
                tile = kernel.Tile(m, n, 64, group, 8 if m == 128 else 4, stages)
                variants.append((str(tile), partial(kernel.gated_linear, x, weight, "silu", tile)))
            yield f"{rows} x {hidden} -> {inner}", variants


MAKERS = {"decode": decodes, "extend": extends, "experts": experts, "gated": gated}

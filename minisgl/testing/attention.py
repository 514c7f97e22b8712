"""A kit to test attention backends with: random batches over shuffled pages, and dense attention as the oracle.

The oracle computes one row after another in float64 from the row's own keys, and knows no pages.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from minisgl.attention import AttentionBackend, AttnBatch, LayerSpec
from minisgl.kvcache.pool import KVPool

__all__ = ["CASES", "AttentionCase", "AttentionConformance", "Laid", "lay_out", "run_case"]


@dataclass(frozen=True)
class AttentionCase:
    """``rows``: (positions before the step, positions computed); rows of one position come first."""

    rows: tuple[tuple[int, int], ...]
    page_size: int = 16
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    window: int = -1
    soft_cap: float = 0.0
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        rows = "_".join(f"{before}+{count}" for before, count in self.rows)
        extra = f"-window{self.window}" * (self.window >= 0) + f"-cap{self.soft_cap:g}" * (self.soft_cap > 0)
        heads = f"{self.q_heads}x{self.kv_heads}x{self.head_dim}"
        return f"{rows}-page{self.page_size}-heads{heads}{extra}-{str(self.dtype).removeprefix('torch.')}"


_MIXED = AttentionCase(((37, 1), (0, 1), (15, 1), (16, 1), (0, 40), (21, 19), (64, 3)))
_LONG = AttentionCase(((300, 1), (3, 1), (0, 290)))
CASES: tuple[AttentionCase, ...] = (
    *(replace(_MIXED, page_size=page) for page in (1, 16, 64)),
    *(replace(_MIXED, q_heads=q, kv_heads=kv, head_dim=d) for q, kv, d in ((4, 4, 16), (8, 1, 128), (6, 2, 32))),
    replace(_MIXED, rows=((5, 1), (90, 1), (11, 1))),
    replace(_MIXED, rows=((0, 33),)),
    *(replace(_MIXED, window=window) for window in (1, 10, 1000)),
    replace(_MIXED, page_size=1, window=10),
    replace(_MIXED, soft_cap=2.0),
    replace(_MIXED, window=10, soft_cap=2.0),
    _LONG,
    replace(_LONG, window=50, page_size=1),
    *(replace(case, dtype=torch.bfloat16) for case in (_MIXED, _LONG)),
)
"""What a backend without limits must pass; one with limits (``needs()``) passes those it claims."""


@dataclass(frozen=True)
class Laid:
    """A case on a device: what a backend is bound to and asked, and what dense attention says to it."""

    pool: KVPool
    layers: tuple[LayerSpec, LayerSpec]  # the case's is the second
    batch: AttnBatch
    q: Tensor  # [tokens, q_heads, head_dim]
    want: Tensor  # like q, float64 on the CPU

    def forward(self, backend: AttentionBackend) -> Tensor:
        """The answer of a backend that was bound and has planned: like q, float64 on the CPU. It writes every row."""
        out = torch.full_like(self.q, float("nan"))
        return backend.forward(self.layers[1], self.q, out).cpu().double()


def run_case(
    backend: AttentionBackend, case: AttentionCase, device: torch.device | str = "cpu", seed: int = 0
) -> tuple[Tensor, Tensor]:
    """What ``backend`` computes for one step, and what dense attention does: both [tokens, q_heads, head_dim] in
    float64 on the CPU. Pages that belong to no row hold NaN, and must not be seen."""
    laid = lay_out(case, backend.needs().layout, device, seed)
    backend.bind(laid.pool, laid.layers, [])
    backend.plan(laid.batch)
    return laid.forward(backend), laid.want


def lay_out(
    case: AttentionCase, layout: Literal["NHD", "HND"] = "NHD", device: torch.device | str = "cpu", seed: int = 0
) -> Laid:
    """Random keys, values and queries for a case, its pages shuffled over a pool."""
    generator = torch.Generator().manual_seed(seed)
    device = torch.device(device)
    layer = LayerSpec(
        1, case.q_heads, case.kv_heads, case.head_dim, case.head_dim**-0.5, window=case.window, soft_cap=case.soft_cap
    )
    before, counts = (np.array(column, np.int32) for column in zip(*case.rows, strict=True))
    seq_lens = before + counts
    columns = [-(-int(n) // case.page_size) for n in seq_lens]
    used, slots = sum(columns), len(case.rows) + 3

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(case.dtype)

    # The pool: page numbers are drawn from twice as many, the others are poisoned.
    pool = KVPool(2, 2 * used + 1, case.page_size, case.kv_heads, case.head_dim, case.dtype, device, layout)
    for buffer in pool.layer(1):
        buffer.fill_(float("nan"))
    numbers = iter(torch.randperm(2 * used, generator=generator).tolist())
    table = torch.full((slots + 1, max(columns) + 2), 2 * used, dtype=torch.int32)
    slot_of = torch.randperm(slots, generator=generator)[: len(case.rows)]
    keys, values = [], []
    for slot, length, pages in zip(slot_of.tolist(), seq_lens.tolist(), columns, strict=True):
        mine = torch.tensor(list(itertools.islice(numbers, pages)), dtype=torch.int32)
        table[slot, :pages] = mine
        k, v = (randn(pages * case.page_size, case.kv_heads, case.head_dim) for _ in range(2))
        offsets = torch.arange(pages * case.page_size)
        out_cache_loc = mine.long()[offsets // case.page_size] * case.page_size + offsets % case.page_size
        pool.store(1, k.to(device), v.to(device), out_cache_loc.to(device))
        keys.append(k[:length])
        values.append(v[:length])

    q = randn(int(counts.sum()), case.q_heads, case.head_dim)
    indptr = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    starts, lengths = torch.from_numpy(indptr).to(device), torch.from_numpy(seq_lens).to(device)
    rows = slot_of.to(device, torch.int32)
    batch = AttnBatch(int((counts == 1).sum()), indptr, seq_lens, starts, lengths, rows, table.to(device))
    want = [
        _dense(q[a:b].to(device), k.to(device), v.to(device), layer).cpu()
        for a, b, k, v in zip(indptr[:-1].tolist(), indptr[1:].tolist(), keys, values, strict=True)
    ]
    layers = (replace(layer, index=0, window=-1, soft_cap=0.0), layer)
    return Laid(pool, layers, batch, q.to(device), torch.cat(want))


def _dense(q: Tensor, k: Tensor, v: Tensor, layer: LayerSpec) -> Tensor:
    """q [n, q_heads, dim] are the last n positions of k, v [length, kv_heads, dim]; in float64."""
    group = layer.q_heads // layer.kv_heads
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("nhd,lhd->hnl", q.double(), k) * layer.scale
    if layer.soft_cap:
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    key = torch.arange(len(k), device=k.device)
    position = key[len(k) - len(q) :, None]
    seen = key <= position
    if layer.window >= 0:
        seen &= key > position - layer.window
    return torch.einsum("hnl,lhd->nhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)


class AttentionConformance:
    """What every attention backend must do. Subclass it in a test file, name it ``Test…`` and say how to make yours."""

    device: torch.device | str = "cpu"
    cases = CASES
    """Leave out what yours refuses, beside the page sizes and dtypes that its ``needs()`` rule out."""
    tolerance = 1e-5
    """Greatest difference in float32; in bfloat16 it is 2e-2."""

    def make(self) -> AttentionBackend:
        """Your backend, fresh."""
        raise NotImplementedError

    def claimed(self) -> list[AttentionCase]:
        """The cases that the backend's own ``needs()`` allow."""
        needs = self.make().needs()
        sizes, dtypes = needs.page_sizes, needs.kv_dtypes
        found = [case for case in self.cases if sizes is None or case.page_size in sizes]
        found = [case for case in found if dtypes is None or case.dtype in dtypes]
        assert found, f"there is no case for pages of {sizes} and {dtypes}: set `cases`"
        return found

    def agree(self, backend: AttentionBackend, case: AttentionCase, seed: int = 0) -> None:
        """Raise AssertionError where the backend's answer is not dense attention's."""
        got, want = run_case(backend, case, self.device, seed)
        eps = 2e-2 if case.dtype == torch.bfloat16 else self.tolerance
        assert got.shape == want.shape, f"{case}: the result is {list(got.shape)}, and should be {list(want.shape)}"
        wrong = (~torch.isclose(got, want, atol=eps, rtol=eps)).flatten(1).any(1)
        if wrong.any():
            token = int(wrong.nonzero()[0])
            at, off = _whose(case, token), float((got - want)[token].abs().max())
            raise AssertionError(f"{case}: {at} is off by {off:.3g}; {int(wrong.sum())} of {len(wrong)} tokens are")

    def test_it_agrees_with_dense_attention(self) -> None:
        for case in self.claimed():
            self.agree(self.make(), case)

    def test_the_smallest_batches(self) -> None:
        """One row: alone, behind a cached prefix, at the edges of a page."""
        plain = self.claimed()[0]
        for before, count in ((0, 1), (0, 2), (1, 1), (15, 1), (16, 1), (17, 1), (15, 2), (16, 2), (40, 5)):
            self.agree(self.make(), replace(plain, rows=((before, count),)))

    def test_a_step_does_not_remember_the_one_before(self) -> None:
        backend, plain = self.make(), self.claimed()[0]
        for seed, rows in enumerate([((90, 1), (0, 60)), ((3, 1),), ((7, 1), (30, 1), (0, 9)), ((90, 1), (0, 60))]):
            self.agree(backend, replace(plain, rows=rows), seed)


def _whose(case: AttentionCase, token: int) -> str:
    """A token of a case, in words."""
    for row, (before, count) in enumerate(case.rows):
        if token < count:
            return f"query {token} of row {row} ({before} positions before, {count} computed)"
        token -= count
    raise IndexError(token)

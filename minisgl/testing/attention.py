"""A conformance kit for attention backends: random batches over shuffled pages, compared with dense attention.

The dense attention computes each row alone, in float64, from the row's own keys and values, without pages.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from minisgl.attention import AttentionBackend, AttnBatch, LayerSpec, QKNorm
from minisgl.kvcache.pool import KVPool

__all__ = ["CASES", "AttentionCase", "AttentionConformance", "PreparedCase", "prepare_case", "run_case"]


@dataclass(frozen=True)
class AttentionCase:
    """The sizes of one step and one layer.

    ``rows`` has (positions computed before the step, positions computed in the step) of each row. Rows that
    compute one position in the step come first. ``window`` is the number of keys that a query sees, the key of its own
    position included (-1: all keys up to this one). ``soft_cap`` is the soft cap of the scores (0: none).
    """

    rows: tuple[tuple[int, int], ...]
    page_size: int = 16
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    window: int = -1
    soft_cap: float = 0.0
    dtype: torch.dtype = torch.float32
    sinks: bool = False  # whether each head has an attention sink

    def __str__(self) -> str:
        rows = "_".join(f"{before}+{count}" for before, count in self.rows)
        extra = f"-window{self.window}" * (self.window >= 0) + f"-cap{self.soft_cap:g}" * (self.soft_cap > 0)
        extra += "-sinks" * self.sinks
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
    replace(_MIXED, sinks=True),
    replace(_MIXED, q_heads=8, kv_heads=1, window=10, sinks=True),
    replace(_LONG, soft_cap=2.0, sinks=True),
    *(replace(case, dtype=torch.bfloat16) for case in (_MIXED, _LONG)),
)
"""The default cases. A backend with limits is tested only with the cases that its ``needs()`` allow."""


@dataclass(frozen=True)
class PreparedCase:
    """A case with random inputs on a device, and the result of dense attention."""

    pool: KVPool
    layers: tuple[LayerSpec, LayerSpec]  # the second is the layer of the case
    batch: AttnBatch
    q: Tensor  # [tokens, q_heads, head_dim]
    expected: Tensor  # like q, float64 on the CPU

    def forward(self, backend: AttentionBackend) -> Tensor:
        """Return the result of a backend, like q, in float64 on the CPU. ``bind`` and ``plan`` were called before.

        The backend must write every row of the result, which contains NaN before.
        """
        out = torch.full_like(self.q, float("nan"))
        return backend.forward(self.layers[1], self.q, out).cpu().double()


def run_case(
    backend: AttentionBackend, case: AttentionCase, device: torch.device | str = "cpu", seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Return the result of ``backend`` for a case, and the result of dense attention.

    Both are [tokens, q_heads, head_dim] in float64 on the CPU. Pages that belong to no row contain NaN, so the result
    of a backend that uses their content contains NaN. For a backend whose ``needs()`` have ``groups``, the pages behind
    the window of a row's first query belong to no row.
    """
    needs = backend.needs()
    prepared = prepare_case(case, needs.layout, device, seed, needs.groups)
    backend.bind(prepared.pool, prepared.layers, [])
    backend.plan(prepared.batch)
    return prepared.forward(backend), prepared.expected


def prepare_case(
    case: AttentionCase,
    layout: Literal["NHD", "HND"] = "NHD",
    device: torch.device | str = "cpu",
    seed: int = 0,
    groups: bool = False,
) -> PreparedCase:
    """Build random keys, values and queries for a case, with pages in random order in a pool of layout ``layout``.

    With ``groups``, a row has an unused page in place of each of those behind the window of its first query.
    """
    generator = torch.Generator().manual_seed(seed)
    device = torch.device(device)
    layer = LayerSpec(
        1, case.q_heads, case.kv_heads, case.head_dim, case.head_dim**-0.5, window=case.window, soft_cap=case.soft_cap
    )
    if case.sinks:  # scores are about 1: some sinks take little of the softmax, and some most of it
        sinks = torch.linspace(-2, 9, case.q_heads, device=device)
        layer = replace(layer, sinks=sinks)
    before, counts = (np.array(column, np.int32) for column in zip(*case.rows, strict=True))
    seq_lens = before + counts
    columns = [-(-int(n) // case.page_size) for n in seq_lens]
    used, pool_rows = sum(columns), len(case.rows) + 3

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(case.dtype)

    # The pool has more than twice the pages that the rows use. The unused pages contain NaN.
    pool = KVPool(2, 2 * used + 1, case.page_size, case.kv_heads, case.head_dim, case.dtype, device, layout)
    for buffer in pool.layer(1):
        buffer.fill_(float("nan"))
    numbers = iter(torch.randperm(2 * used, generator=generator).tolist())
    page_table = torch.full((pool_rows + 1, max(columns) + 2), 2 * used, dtype=torch.int32)
    req_pool_indices = torch.randperm(pool_rows, generator=generator)[: len(case.rows)]
    keys, values = [], []
    for req_pool_idx, (start, count), num_pages in zip(req_pool_indices.tolist(), case.rows, columns, strict=True):
        pages = torch.tensor(list(itertools.islice(numbers, num_pages)), dtype=torch.int32)
        page_table[req_pool_idx, :num_pages] = pages
        k, v = (randn(num_pages * case.page_size, case.kv_heads, case.head_dim) for _ in range(2))
        offsets = torch.arange(num_pages * case.page_size)
        out_cache_loc = pages.long()[offsets // case.page_size] * case.page_size + offsets % case.page_size
        pool.store(1, k.to(device), v.to(device), out_cache_loc.to(device))
        if groups and case.window >= 0:
            page_table[req_pool_idx, : max(start - case.window + 1, 0) // case.page_size] = 2 * used
        keys.append(k[: start + count])
        values.append(v[: start + count])

    q = randn(int(counts.sum()), case.q_heads, case.head_dim)
    cu_seqlens_q = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    on_device = torch.from_numpy(cu_seqlens_q).to(device), torch.from_numpy(seq_lens).to(device)
    num_decode, rows = int((counts == 1).sum()), req_pool_indices.to(device, torch.int32)
    batch = AttnBatch(num_decode, cu_seqlens_q, seq_lens, *on_device, rows, page_table.to(device))
    expected = [
        _dense(q[a:b].to(device), k.to(device), v.to(device), layer).cpu()
        for a, b, k, v in zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist(), keys, values, strict=True)
    ]
    layers = (replace(layer, index=0, window=-1, soft_cap=0.0, sinks=None), layer)
    return PreparedCase(pool, layers, batch, q.to(device), torch.cat(expected))


def _dense(q: Tensor, k: Tensor, v: Tensor, layer: LayerSpec) -> Tensor:
    """Return dense attention in float64, [n, q_heads, dim].

    ``q`` [n, q_heads, dim] are the queries of the last n positions of ``k`` and ``v`` [length, kv_heads, dim].
    """
    group = layer.q_heads // layer.kv_heads
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("nhd,lhd->hnl", q.double(), k) * layer.scale
    if layer.soft_cap:
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    key = torch.arange(len(k), device=k.device)
    position = key[len(k) - len(q) :, None]
    mask = key <= position
    if layer.window >= 0:
        mask &= key > position - layer.window
    scores = scores.masked_fill(~mask, float("-inf"))
    if layer.sinks is not None:
        scores = torch.cat((scores, layer.sinks.double()[:, None, None].expand(*scores.shape[:-1], 1)), dim=-1)
    return torch.einsum("hnl,lhd->nhd", scores.softmax(-1)[..., : len(k)], v)


class _Dense(AttentionBackend):
    """Dense attention, row by row, with the KV store of the base class."""

    def plan(self, batch: AttnBatch) -> None:
        self.batch = batch

    def forward(self, layer: LayerSpec, q: Tensor, out: Tensor) -> Tensor:
        ends, keys_and_values = self.batch.cu_seqlens_q_cpu.tolist(), self.pool.layer(layer.index)
        for row, length in enumerate(self.batch.seq_lens_cpu.tolist()):
            where = _kv_locations(self.batch, self.pool.page_size, row)[:length]
            k, v = (x.flatten(0, 1)[where] for x in keys_and_values)
            out[ends[row] : ends[row + 1]] = _dense(q[ends[row] : ends[row + 1]], k, v, layer).to(out.dtype)
        return out


def _attend(backend: AttentionBackend, case: AttentionCase, device: torch.device | str, normed: bool) -> list[Tensor]:
    """Return the result of ``backend.attend`` for a case, and the keys and values in the pool: float64, on the CPU."""
    layout = "NHD" if isinstance(backend, _Dense) else backend.needs().layout
    prepared, generator = prepare_case(case, layout, device), torch.Generator().manual_seed(1)
    batch, layer = prepared.batch, prepared.layers[1]
    heads, dim = layer.q_heads + 2 * layer.kv_heads, layer.head_dim

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    qkv = randn(len(prepared.q), heads * dim).to(case.dtype)
    weights = (1 + randn(2, dim) / 4).to(case.dtype)
    norm = QKNorm(weights[0], weights[1], 1e-6) if normed else None
    angles = 6 * randn(len(qkv), dim // 2)
    q_lens = np.diff(batch.cu_seqlens_q_cpu).tolist()
    out_cache_loc = torch.cat([_kv_locations(batch, case.page_size, row)[-n:] for row, n in enumerate(q_lens)])
    backend.bind(prepared.pool, prepared.layers, [])
    backend.plan(batch)
    out = backend.attend(layer, qkv, norm, torch.cat((angles.cos(), angles.sin()), -1), out_cache_loc)
    return [x.cpu().double() for x in (out, *prepared.pool.layer(1))]


def _kv_locations(batch: AttnBatch, page_size: int, row: int) -> Tensor:
    """Return the KV locations of all positions of a row, int64 [positions]."""
    position = torch.arange(int(batch.seq_lens_cpu[row]), device=batch.page_table.device)
    return (
        batch.page_table[batch.req_pool_indices[row], position // page_size].long() * page_size + position % page_size
    )


class AttentionConformance:
    """The tests that every attention backend must pass.

    Subclass it in a test file, give the subclass a name that begins with ``Test``, and implement `make`.
    """

    device: torch.device | str = "cpu"
    cases = CASES
    """The cases to test. Leave out the cases that your backend does not support.

    The kit itself skips the page sizes, dtypes and sinks that the backend's ``needs()`` exclude.
    """
    tolerance = 1e-5
    """``atol`` and ``rtol`` of torch.isclose in float32 cases. In bfloat16 cases, 2e-2 is used for each of them."""

    def make(self) -> AttentionBackend:
        """Build a new object of your backend."""
        raise NotImplementedError("make(self) must return a new object of the attention backend to test")

    def supported_cases(self) -> list[AttentionCase]:
        """Return the cases that the backend's ``needs()`` allow. Raise AssertionError if there are none."""
        needs = self.make().needs()
        sizes, dtypes = needs.page_sizes, needs.kv_dtypes
        found = [case for case in self.cases if needs.sinks or not case.sinks]
        found = [case for case in found if sizes is None or case.page_size in sizes]
        found = [case for case in found if dtypes is None or case.dtype in dtypes]
        assert found, (
            f"no case has a page size of {sizes} and a dtype of {dtypes}, which needs() requires: set `cases` to cases "
            "that your backend supports"
        )
        return found

    def agree(self, backend: AttentionBackend, case: AttentionCase, seed: int = 0) -> None:
        """Raise AssertionError if the backend's result for a case differs from dense attention."""
        got, want = run_case(backend, case, self.device, seed)
        eps = 2e-2 if case.dtype == torch.bfloat16 else self.tolerance
        assert got.shape == want.shape, (
            f"{case}: the shape of the result is {list(got.shape)}, expected {list(want.shape)}"
        )
        wrong = (~torch.isclose(got, want, atol=eps, rtol=eps)).flatten(1).any(1)
        if wrong.any():
            token = int(wrong.nonzero()[0])
            query, off = _describe(case, token), float((got - want)[token].abs().max())
            raise AssertionError(
                f"{case}: {query} is off by {off:.3g}; expected at most {eps:g}. {int(wrong.sum())} of {len(wrong)} "
                "queries are wrong"
            )

    def test_dense_attention(self) -> None:
        """The result equals dense attention in all supported cases."""
        for case in self.supported_cases():
            self.agree(self.make(), case)

    def test_one_row(self) -> None:
        """A batch of one row: a prompt or decode row, with and without a cached prefix, mostly near position 16."""
        plain = self.supported_cases()[0]
        for before, count in ((0, 1), (0, 2), (1, 1), (15, 1), (16, 1), (17, 1), (15, 2), (16, 2), (40, 5)):
            self.agree(self.make(), replace(plain, rows=((before, count),)))

    def test_attend(self) -> None:
        """`attend` stores the keys and values that the base class stores, and returns dense attention over them.

        A backend without `attend` is not tested: the plugin manager gives it that of the base class.
        """
        plain = self.supported_cases()[0]
        few, mixed = ((5, 1), (90, 1), (15, 1)), ((37, 1), (16, 1), (0, 20), (21, 3))
        for rows, normed in itertools.product((few, mixed), (False, True)):
            case = replace(plain, rows=rows)
            made = self.make()
            if hasattr(made, "attend"):
                stored, attended = (_attend(backend, case, self.device, normed) for backend in (_Dense(), made))
                eps = 10 * self.tolerance if case.dtype == torch.float32 else 4e-2
                for got, want, what in zip(attended, stored, ("result", "keys in the pool", "values"), strict=True):
                    wrong = ~torch.isclose(got, want, atol=eps, rtol=eps, equal_nan=what != "result")
                    off = float((got - want)[wrong].abs().max()) if wrong.any() else 0.0
                    assert not wrong.any(), f"{case}: after `attend`, the {what} are off by {off:.3g}"

    def test_no_state_between_steps(self) -> None:
        """The result of a step does not depend on the steps before it."""
        backend, plain = self.make(), self.supported_cases()[0]
        for seed, rows in enumerate([((90, 1), (0, 60)), ((3, 1),), ((7, 1), (30, 1), (0, 9)), ((90, 1), (0, 60))]):
            self.agree(backend, replace(plain, rows=rows), seed)


def _describe(case: AttentionCase, token: int) -> str:
    """Return the row and the query of a token of a case, in words."""
    for row, (before, count) in enumerate(case.rows):
        if token < count:
            return f"query {token} of row {row} ({before} positions before, {count} computed)"
        token -= count
    raise IndexError(token)

"""Gates of lab `paged`: attention over shuffled pages, in a pool whose other pages are filled with NaN.

A wrong answer is compared with the answers that known mistakes give. A torch function mode counts how many KV positions
the code reads from the pool.
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from minisgl.attention import AttnBatch, LayerSpec
from minisgl.chapters.lab.grader.attention_steps import AttentionSteps, make_steps, show_steps
from minisgl.chapters.lab.grader.conformance import conformance, greedy
from minisgl.chapters.lab.grader.gate import Broken, Gate, Invalid, Stretch, Student, amount
from minisgl.chapters.lab.grader.search import search
from minisgl.chapters.lab.grader.server_gate import facts
from minisgl.chapters.lab.grader.torch_operations import ROWS, operations_of_a_decode_step
from minisgl.chapters.lab.grader.two_devices import TwoDevices
from minisgl.kvcache.pool import KVPool
from minisgl.testing.attention import AttentionCase, PreparedCase, prepare_case

HEADS = ((2, 2, 8), (4, 2, 16), (4, 1, 8), (6, 3, 16))
TOLERANCE = 1e-4  # float32 against float64
TOLERANCE_BF16 = 2e-2  # bfloat16 has 8 bits: the rounding of the answer alone is 4e-3
TOLERANCE_MEAN = 4e-3  # absolute and relative, for means of values in [1, 2) in bfloat16: rounding is off by up to 4e-3
SCALE_UP = 8.0  # factor of the scores in half precision: rounding a score then changes the answer visibly
SCALES = (0.0, 0.3, 12.0, 1.0)  # 0: head_dim ** -0.5
HIGH = 512.0  # a query of this size times a key of half this size is a score above float16's range
LOW = 2e18  # a query of this size times a key of half this size is a score below every finite mask but the lowest
LENGTHS = (1, 4100, 8200, 16_500, 40_000, 70_000)
VERY_LONG = 300_000
UNDEFINED = (-1, 2**31 - 1, -(2**31), 1_000_000)  # entries of the page table after the last page of a row
BLOCKS = (64, 128, 256, 512, 1024, 2048, 4096)
UNWRITTEN = 12288.0  # initial value of `out`; exact in bfloat16


def make(rng: random.Random, size: int) -> dict[str, Any]:
    """Return a random step of decode rows and prefill rows, some of them behind a cached prefix."""
    most = (3, 5, 9, 17, 40)[min(size // 4, 4)]
    rows = [
        [rng.randint(0, most), 1 if rng.random() < 0.5 else rng.randint(2, most)]
        for _ in range(rng.randint(1, 1 + size // 3))
    ]
    more = {"page_size": rng.choice([1, 2, 4, 12, 16]), "heads": rng.randrange(len(HEADS)), "seed": rng.randrange(1000)}
    window = rng.choice([0, 0, 0, 1, 3, 10, 70]) if size > 9 else 0
    cap, half = int(size > 9 and rng.random() < 0.3) * rng.randint(1, 12), int(size > 10 and rng.random() < 0.2)
    if size == 5:  # values that nearly cancel: the rounding of a weight then changes the answer visibly
        rows, half, window, cap = [[7, 1], [3, 1], [14, 2], [31, 1]], 2, 0, 0
        more["page_size"] = 4
    if size == 4:  # more rows and more positions than a constant in the code may allow
        rows = [[rng.randint(0, 40), 1] for _ in range(20)] + [[990, 40]]
        more["page_size"] = 16
    if size == 2:
        rows, more = [[8300, 1], [16_500, 2]], {**more, "page_size": 256, "heads": 0}
    if size == 6:  # a window behind which thousands of positions are masked
        rows, window, more = [[2990, 1], [40_100, 1], [2500, 3]], 60, {**more, "page_size": 256, "heads": 0}
    return {"rows": rows, **more, "window": window, "cap": cap, "half": half, "scale": rng.randrange(len(SCALES))}


def make_attend(rng: random.Random, size: int) -> dict[str, Any]:
    """Return a random step, or a history of steps, or a step beyond the sizes and numbers of the others."""
    workload = make(rng, size)
    if size == 3:
        return {**workload, "rows": [[9, 1], [30, 3], [0, 4]], "page_size": 4, "half": 3}
    if size == 1:
        return {**workload, "rows": [[9, 1], [30, 3], [0, 4]], "page_size": 4, "half": 4, "heads": 0}
    if size == 11:  # keys at right angles to the query: a rounded query is not at right angles to them
        return {**workload, "rows": [[40, 1]] * 6, "page_size": 4, "half": 6, "heads": 0, "window": 0}
    if size == 10:  # thousands of equal weights: a sum in bfloat16 stops growing
        return {**workload, "rows": [[8190, 2]], "page_size": 256, "half": 5, "heads": 0, "window": 0}
    if size == 7:
        return {**workload, "rows": [[0, 1]] * 150 + [[1, 1]] * 150, "page_size": 2, "heads": 0}
    if size == 8:
        return {"chunk": 4500, "before": rng.randint(0, 90), "window": rng.choice([0, 100])}
    return make_steps(rng, size) if (size % 3 == 2 and size > 8) or size == 9 else workload


def case_of(workload: dict[str, Any]) -> AttentionCase:
    """Return the workload as a case of the conformance kit. Raise `Invalid` if a row computes no token."""
    rows = [(before, count) for before, count in workload["rows"]]
    if not rows or workload["page_size"] < 1 or any(count < 1 or before < 0 for before, count in rows):
        raise Invalid
    rows.sort(key=lambda row: row[1] != 1)  # rows of one token come first
    q, kv, dim = HEADS[workload["heads"]]
    window, cap = workload["window"] or -1, 0.5 * workload["cap"]
    dtype = {1: torch.bfloat16, 2: torch.bfloat16, 4: torch.float16, 5: torch.bfloat16, 6: torch.bfloat16}.get(
        workload["half"], torch.float32
    )
    return AttentionCase(tuple(rows), workload["page_size"], q, kv, dim, window=window, soft_cap=cap, dtype=dtype)


def draw(workload: dict[str, Any]) -> str:
    """Describe the workload: one line for the sizes, then one line for each row."""
    if "chunk" in workload:
        window = f", window {workload['window']}" * bool(workload["window"])
        return f"a row that computes {workload['chunk']} positions after {workload['before']} cached ones{window}"
    if "steps" in workload:
        return show_steps(workload)
    q, kv, dim = HEADS[workload["heads"]]
    more = f", window {workload['window']}" * bool(
        workload["window"]
    ) + f", scores capped at {workload['cap'] / 2}" * bool(workload["cap"])
    more += f", scale {SCALES[workload.get('scale', 0) % len(SCALES)]}" * bool(workload.get("scale"))
    more += (
        "",
        ", in bfloat16",
        ", in bfloat16, values that nearly cancel",
        ", all scores -2e36",
        ", in float16, all scores 131,072",
        ", in bfloat16, all scores 0 and values from 1 to 2",
        ", in bfloat16, large keys with small scores",
    )[workload["half"]]
    lines = [f"pages of {amount(workload['page_size'], 'token')}, {q} query and {kv} key-value heads of {dim}{more}"]
    for before, count in sorted(workload["rows"], key=lambda row: row[1] != 1):
        lines.append(f"a row that computes {count} position{'s' * (count > 1)} after {before} cached ones")
    return "\n".join(lines)


# ---- the answers that known mistakes give ---------------------------------------------------------------------


@dataclass
class Row:
    """One row of a case: its queries, and the keys and values of all its pages, with the whole last page.

    ``q`` is [queries, q_heads, head_dim], ``k`` and ``v`` are [positions, kv_heads, head_dim].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    length: int
    layer: LayerSpec

    def dense(
        self, *, seen: Tensor | None = None, first: int = 0, last: int | None = None, repeat: bool = False, **other: Any
    ) -> Tensor:
        """Compute attention in float64 over the positions ``first`` to ``last`` with the mask ``seen``.

        ``repeat`` and ``other`` introduce known mistakes.
        """
        spec, last = self.layer, last if last is not None else self.length
        group = spec.q_heads // spec.kv_heads
        k, v = (x[first:last].double() for x in (self.k, self.v))
        k, v = (x.repeat(1, group, 1) if repeat else x.repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", self.q.double(), k) * other.get("scale", spec.scale)
        cap, early = other.get("cap", spec.soft_cap), other.get("early")
        if early:  # the mistake: capped before the scale
            scores = cap * torch.tanh(scores / spec.scale / cap) * spec.scale
        if seen is None:
            seen = self.mask(window=other.get("window", spec.window))[:, first:last]
        if cap and not early:
            scores = other.get("factor", cap) * torch.tanh(scores / cap)
            if other.get("late"):  # the mistake: masked before the cap, so that minus infinity became -cap
                scores, seen = scores.masked_fill(~seen, -cap), torch.ones_like(seen)
        if other.get("zeroed"):
            return torch.einsum("hqk,khd->qhd", scores.softmax(-1) * seen, v)
        masked = scores.masked_fill(~seen, other.get("finite", -torch.inf))
        return torch.einsum("hqk,khd->qhd", masked.softmax(-1), v)

    def mask(self, window: int = -1, shift: int | None = None, strict: bool = False) -> Tensor:
        """Return the mask [queries, length]. ``shift`` is the position of the first query; ``strict`` omits its own."""
        queries, key = len(self.q), torch.arange(self.length)
        at = (self.length - queries if shift is None else shift) + torch.arange(queries)[:, None]
        seen = key < at if strict else key <= at
        return seen & (key > at - window) if window >= 0 else seen

    def in_blocks(self, block: int) -> Tensor:
        """Return the answer if each block of queries is taken for the last positions of the row."""
        parts = [replace(self, q=part).dense() for part in self.q.split(block)]
        return torch.cat(parts)

    def mistakes(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (cause, answer) for each known mistake."""
        queries, whole, spec = len(self.q), len(self.k), self.layer
        before = self.length - queries
        window = spec.window
        yield "top-left", self.dense(seen=self.mask(window, shift=0))
        if window >= 0:
            for other in (-1, window + 1, window - 1):
                yield "window", self.dense(window=other)
        tail = torch.ones(queries, whole - self.length, dtype=torch.bool)
        yield "tail", self.dense(seen=torch.cat((self.mask(window), tail), 1), last=whole)
        yield "no-mask", self.dense(seen=torch.ones(queries, self.length, dtype=torch.bool))
        yield "no-mask", self.dense(seen=torch.ones(queries, whole, dtype=torch.bool), last=whole)
        yield "prefix", self.dense(seen=self.mask(window)[:, before:], first=before)
        yield "prefix", self.dense(seen=self.mask(window, shift=0)[:, :queries], last=queries)
        yield "groups", self.dense(repeat=True)
        yield "scale", self.dense(scale=1.0)
        yield "scale", self.dense(scale=spec.scale**2)
        yield "scale", self.dense(scale=spec.head_dim**-1.0)
        yield "scale", self.dense(scale=spec.head_dim**-0.5)
        for block in BLOCKS:
            if queries > block:
                yield "blocks", self.in_blocks(block)
        yield "zeroed", self.dense(zeroed=True)
        for finite in (-10.0, -20.0, -30.0, -50.0, -100.0, -1e30):
            yield "finite", self.dense(finite=finite)
        if before or queries > 1:
            yield "self", self.dense(seen=self.mask(window, strict=True))
        if spec.soft_cap:
            yield "cap", self.dense(cap=0.0)
            yield "cap", self.dense(factor=1.0)
            yield "cap", self.dense(early=True)
            yield "cap", self.dense(late=True)
            for cap in (1.0, 2.0, 4.0, 30.0, 50.0):
                yield "cap", self.dense(cap=cap)


def rows_of(prepared: PreparedCase) -> Iterator[tuple[int, int, Row]]:
    """Yield (first token, end of its tokens, row) for each row of the step."""
    batch, layer = prepared.batch, prepared.layers[1]
    keys, values = prepared.pool.layer(layer.index)
    ends, size = batch.cu_seqlens_q_cpu.tolist(), prepared.pool.page_size
    for r, length in enumerate(batch.seq_lens_cpu.tolist()):
        pages = batch.page_table[batch.req_pool_indices[r], : -(-length // size)].long()
        k, v = keys[pages].flatten(0, 1), values[pages].flatten(0, 1)
        yield ends[r], ends[r + 1], Row(prepared.q[ends[r] : ends[r + 1]], k, v, length, layer)


def explain(prepared: PreparedCase, got: Tensor, tolerance: float = 0.0) -> Broken | None:
    """Return the finding for the first wrong row, with the mistake that gives its answer; None if all are right.

    ``tolerance`` 0: the tolerance of the dtype.
    """
    half = prepared.q.dtype != torch.float32
    tolerance = tolerance or (TOLERANCE_BF16 if half else TOLERANCE)
    for number, (a, b, row) in enumerate(rows_of(prepared)):
        mine, want = got[a:b], prepared.expected[a:b]
        if close(mine, want, tolerance):
            continue
        if mine.isnan().any():
            cause, off = "pages", "is not a number: the code read a page that no row of the step owns"
        else:
            likely = (name for name, other in row.mistakes() if close(mine, other, tolerance))
            near = half and bool((mine - want).abs().mean() < 0.2 * (1 + want.abs().mean()))
            cause = next(likely, "digits" if near else "answer")
            off = f"is off by {(mine - want).abs().max():.2g}"
        seen = f"The answer of row {number} ({row.length} positions, of which it computes {b - a}) {off}."
        seen += (
            f" The layer has {parameters(row.layer)}; the queries are {str(prepared.q.dtype).removeprefix('torch.')}."
        )
        return Broken(cause, "Attention over scattered pages gives the answer of dense attention.", seen)
    return None


def parameters(layer: LayerSpec) -> str:
    """Return the scale, the window and the soft cap of a layer as text."""
    window = f"window {layer.window}" if layer.window >= 0 else "no window"
    return (
        f"scale {layer.scale:.4g}, {window} and {f'soft cap {layer.soft_cap:g}' if layer.soft_cap else 'no soft cap'}"
    )


def close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Return whether two tensors are equal within an absolute and relative tolerance."""
    return a.shape == b.shape and bool(torch.isclose(a, b, atol=tolerance, rtol=tolerance).all())


def drawn_case(workload: dict[str, Any]) -> PreparedCase:
    """Return the workload's step, with numbers of no page in the undefined entries of the page table."""
    prepared = prepare_case(case_of(workload), seed=workload["seed"])
    batch, size = prepared.batch, prepared.pool.page_size
    table = torch.tensor(UNDEFINED, dtype=torch.int32).repeat(batch.page_table.numel() // len(UNDEFINED) + 1)
    table = table[: batch.page_table.numel()].reshape(batch.page_table.shape)
    table[-1] = batch.page_table[-1]
    for row, length in zip(batch.req_pool_indices.tolist(), batch.seq_lens_cpu.tolist(), strict=True):
        pages = -(-length // size)
        table[row, :pages] = batch.page_table[row, :pages]
    return replace(prepared, batch=replace(batch, page_table=table))


def prepared_case(workload: dict[str, Any]) -> PreparedCase:
    """Return the workload's step.

    In half precision the scores are scaled up, to the sizes that trained models have: rounding a score before the
    softmax then changes its weight visibly.
    """
    prepared = drawn_case(workload)
    if not workload["half"] and not workload.get("scale"):
        return prepared
    if workload["half"] == 2:
        return _cancelling(prepared)
    if workload["half"] == 6:
        return _right_angles(prepared)
    if workload["half"] in (3, 4):
        return _equal(prepared, *((LOW, -LOW / 2) if workload["half"] == 3 else (HIGH, HIGH / 2)))
    if workload["half"] == 5:
        values = prepared.pool.layer(1)[1]
        values.copy_(1 + values.abs() % 1)  # NaN stays NaN
        return _equal(prepared, 0.0, 0.0)
    scale = SCALE_UP * prepared.layers[1].scale if workload["half"] else SCALES[workload["scale"] % len(SCALES)]
    scaled = replace(prepared.layers[1], scale=scale)
    prepared = replace(prepared, layers=(prepared.layers[0], scaled))
    return replace(prepared, expected=torch.cat([row.dense() for _, _, row in rows_of(prepared)]))


def _cancelling(prepared: PreparedCase) -> PreparedCase:
    """Return the step with pairs of positions that have almost equal keys, and large values of opposite signs.

    So a sum in float32 of weights times values is small and exact to the digits of the answer, and one with rounded
    weights is not. Raise `Invalid` if a page has no pairs.
    """
    if prepared.pool.page_size % 2:
        raise Invalid
    keys, values = prepared.pool.layer(1)  # [pages, page_size, kv_heads, head_dim]
    keys[:, 1::2] = keys[:, 0::2] + 0.05 * keys[:, 1::2]
    values[:, 0::2] *= 128
    values[:, 1::2] = -values[:, 0::2]
    return replace(prepared, expected=torch.cat([row.dense() for _, _, row in rows_of(prepared)]))


def _right_angles(prepared: PreparedCase) -> PreparedCase:
    """Return the step with large keys that are almost at right angles to the query of their row.

    So the scores are small sums of large products. Rounding a query to bfloat16 after a multiplication changes them.
    """
    keys, _ = prepared.pool.layer(1)  # [pages, page_size, kv_heads, head_dim]
    batch, size = prepared.batch, prepared.pool.page_size
    for a, length, index in zip(
        batch.cu_seqlens_q_cpu.tolist(), batch.seq_lens_cpu, batch.req_pool_indices, strict=False
    ):
        pages = batch.page_table[index, : -(-int(length) // size)].long()
        q, k = prepared.q[a].double(), 200 * keys[pages].double()
        keys[pages] = (k - q * ((k * q).sum(-1) / (q * q).sum(-1))[..., None]).to(keys.dtype)
    scaled = replace(prepared.layers[1], scale=0.3)
    prepared = replace(prepared, layers=(prepared.layers[0], scaled))
    return replace(prepared, expected=torch.cat([row.dense() for _, _, row in rows_of(prepared)]))


def _equal(prepared: PreparedCase, query: float, key: float) -> PreparedCase:
    """Return the step with the score ``query`` · ``key`` everywhere: a query sees its positions with equal weights."""
    keys, _ = prepared.pool.layer(1)
    keys.masked_fill_(~keys.isnan(), 0.0)
    keys[..., 0].masked_fill_(~keys[..., 0].isnan(), key)
    q = torch.zeros_like(prepared.q)
    q[..., 0] = query
    layer = replace(prepared.layers[1], scale=1.0, soft_cap=0.0)
    prepared = replace(prepared, q=q, layers=(prepared.layers[0], layer))
    return replace(prepared, expected=torch.cat([row.dense() for _, _, row in rows_of(prepared)]))


# ---- gates -------------------------------------------------------------------------------------------------


class Untouched:
    """The caller's tensors as they were before a call, and the check that they are the same after it."""

    def __init__(self, prepared: PreparedCase):
        self.prepared, self.before = prepared, [x.copy() for x in self._all(prepared)]

    @staticmethod
    def _all(prepared: PreparedCase) -> list[np.ndarray[Any, Any]]:
        batch, pool = prepared.batch, prepared.pool.layer(prepared.layers[1].index)
        given = (prepared.q, batch.page_table, batch.seq_lens, batch.cu_seqlens_q, batch.req_pool_indices, *pool)
        arrays = [(x if x.dtype != torch.bfloat16 else x.view(torch.int16)).numpy() for x in given]
        return [*arrays, batch.seq_lens_cpu, batch.cu_seqlens_q_cpu]

    def check(self) -> None:
        """Raise `Broken` if one of the tensors has changed."""
        names = ["queries", "page table", "lengths", "ends of the rows", "request-pool indices", "keys in the pool"]
        names += ["values in the pool", "lengths on the CPU", "ends of the rows on the CPU"]
        for name, before, after in zip(names, self.before, self._all(self.prepared), strict=True):
            if not np.array_equal(before, after, equal_nan=before.dtype.kind == "f"):
                seen = f"After `plan` and `forward`, the {name} were others than before."
                raise Broken("changes", "The backend writes `out`, and changes no other tensor of the caller.", seen)


def forward(backend: Any, prepared: PreparedCase, layer: LayerSpec) -> Tensor:
    """Return the backend's answer for a layer of a planned step, in float64. Raise `Broken` if it is not in `out`.

    The queries are a view of a larger tensor, as in the engine.
    """
    out = torch.full_like(prepared.q, UNWRITTEN)
    q = torch.cat((prepared.q, prepared.q[:, :1]), dim=1)[:, :-1]
    got = backend.forward(layer, q, out)
    if not torch.equal(q, prepared.q):
        seen = "After `forward`, the queries were others than before."
        raise Broken("changes", "The backend writes `out`, and changes no other tensor of the caller.", seen)
    if not isinstance(got, Tensor) or (got.shape == out.shape and not torch.equal(got.nan_to_num(), out.nan_to_num())):
        seen = "The result that `forward` returned is not in the tensor `out`."
        raise Broken("unwritten", "`forward` writes `out`, and returns it.", seen)
    return got.double()


def bound(student: Student, prepared: PreparedCase) -> Any:
    """Return the student's backend, bound to the case's pool."""
    backend = student.make(device=torch.device("cpu"))
    backend.bind(prepared.pool, prepared.layers, [])
    return backend


def reloaded(student: Student, prepared: PreparedCase) -> Any:
    """Return a backend of a newly loaded copy of the student's file, which has no data of earlier engines."""
    assert student.plugin is not None
    fresh = Student(student.lab, student.path)
    with patch.dict(sys.modules):
        sys.modules.pop(student.plugin.module.__name__, None)
        fresh.load()
    return bound(fresh, prepared)


def run_agree(student: Student, workload: dict[str, Any]) -> None:
    """Grade the whole backend on one step."""
    if "chunk" in workload:
        return run_long_chunk(student, workload)
    if "steps" in workload:
        return run_steps(student, workload)
    prepared = prepared_case(workload)
    backend = bound(student, prepared)
    untouched = Untouched(prepared)
    try:
        backend.plan(prepared.batch)
        got = forward(backend, prepared, prepared.layers[1])
    except Broken:
        raise
    except Exception as error:
        raise undefined_pages(student, prepared, error) or error from error
    if got.shape != prepared.expected.shape:
        seen = f"The result has the shape {list(got.shape)}, the queries {list(prepared.expected.shape)}."
        raise Broken("answer", "The result has the shape of the queries.", seen)
    for number, (a, b, row) in enumerate(rows_of(prepared)):
        if bool((got[a:b] == UNWRITTEN).any()):
            seen = f"Row {number} ({row.length} positions, of which it computes {b - a}) is not fully written."
            raise Broken("unwritten", "Decode rows and prefill rows of `out` are all written.", seen)
    long = workload["half"] == 5
    wrong = explain(prepared, got, TOLERANCE_MEAN if long else 0.0)
    if wrong is not None:
        raise not_a_number(student, prepared) or wrong if wrong.cause == "pages" else wrong
    untouched.check()
    if len(workload["rows"]) < 100 and not long:
        run_next_step(student, backend, prepared)
    if 20 < len(workload["rows"]) < 100:
        check_attend(student)
        check_memory(student)


def undefined_pages(student: Student, prepared: PreparedCase, error: Exception) -> Broken | None:
    """Return the finding for an error that does not occur if all entries of the page table are numbers of pages."""
    table, pages = prepared.batch.page_table, prepared.pool.num_pages
    clean = replace(
        prepared, batch=replace(prepared.batch, page_table=torch.where(table.abs() < pages, table.abs(), 0))
    )
    try:
        alone(student, clean)
    except Exception:
        return None
    promise = "Entries of the page table after a row's last page are undefined: they may be any number."
    seen = f"With {list(UNDEFINED)} in these entries, there was an error: {type(error).__name__}: {error}."
    return Broken("undefined", promise, " ".join(seen.split())[:300])


def check_attend(student: Student) -> None:
    """Call `attend_row` alone, and once as if its arguments were on a GPU.

    A backend without this method is not checked.
    """
    prepared = prepare_case(AttentionCase(((3, 2),), 4, 4, 2, 8, window=3, soft_cap=2.0), seed=1)
    backend, layer = bound(student, prepared), prepared.layers[1]
    backend.plan(prepared.batch)
    if not hasattr(backend, "attend_row"):
        return
    row = next(rows_of(prepared))[2]
    q, k, v = row.q.clone(), row.k[: row.length].clone(), row.v[: row.length].clone()
    before = [x.clone() for x in (q, k, v)]
    backend.attend_row(layer, q, k, v)
    changed = [name for name, a, b in zip("qkv", before, (q, k, v), strict=True) if not torch.equal(a, b)]
    if changed:
        seen = f"`attend_row` changed its argument `{changed[0]}`."
        raise Broken("changes", "The arguments of `attend_row` do not change.", seen)
    check_one_device("attend_row", (q, k, v), lambda: backend.attend_row(layer, q, k, v))


def check_one_device(method: str, given: Sequence[Tensor], call: Callable[[], Any]) -> None:
    """Check that a call makes no tensor on the CPU and computes with it and the tensors ``given``, as if on a GPU."""
    devices = TwoDevices(given)
    with devices.follow():
        call()
    if devices.mixed:
        seen = f"`{method}` makes a tensor without `device=`. If its arguments are on a GPU, `{devices.mixed}` fails."
        raise Broken("device", "Tensors that a backend makes are on the device of its inputs.", seen)


def check_memory(student: Student, warm: int = 150, steps: int = 60) -> None:
    """Check that a backend does not keep more and more tensors. Each step has a row of another length."""
    prepared = prepare_case(AttentionCase(((warm + steps, 1),), 64, 2, 1, 8), seed=1)
    backend, batch, layer = bound(student, prepared), prepared.batch, prepared.layers[1]
    tensors = 0
    for length in range(1, warm + steps + 1):
        lengths = np.array([length], np.int32)
        backend.plan(replace(batch, seq_lens_cpu=lengths, seq_lens=torch.from_numpy(lengths)))
        backend.forward(layer, prepared.q.clone(), torch.empty_like(prepared.q))
        if length == warm:
            tensors = number_of_tensors()
    grown = number_of_tensors() - tensors
    if grown > 0.9 * steps:
        promise = "A backend keeps data of a step until the next call of `plan`, and not longer."
        seen = f"In {steps} steps whose row had another length each, the number of tensors in memory grew by {grown}."
        raise Broken("grows", promise, seen)


def number_of_tensors() -> int:
    """Return the number of tensors that Python objects refer to."""
    gc.collect()
    return sum(issubclass(type(x), Tensor) for x in gc.get_objects())


def shuffled(prepared: PreparedCase) -> PreparedCase:
    """Return the next step of the same pool: its requests have changed places in the batch and in the request pool."""
    batch, n = prepared.batch, len(prepared.batch.seq_lens_cpu)
    order = [*reversed(range(batch.num_decode)), *reversed(range(batch.num_decode, n))]
    ends = batch.cu_seqlens_q_cpu.tolist()
    tokens = [t for r in order for t in range(ends[r], ends[r + 1])]
    seq_lens = batch.seq_lens_cpu[order]
    counts = [ends[r + 1] - ends[r] for r in order]
    cu_seqlens_q = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    page_table, index = batch.page_table.clone(), batch.req_pool_indices.long()
    page_table[index] = batch.page_table[index[order]]
    on_device = torch.from_numpy(cu_seqlens_q), torch.from_numpy(seq_lens)
    moved = AttnBatch(batch.num_decode, cu_seqlens_q, seq_lens, *on_device, batch.req_pool_indices, page_table)
    return replace(prepared, batch=moved, q=prepared.q[tokens], expected=prepared.expected[tokens])


def run_next_step(student: Student, backend: Any, prepared: PreparedCase) -> None:
    """Check a second and a third step of the same backend: the first layer is computed too, other requests have pages.

    An answer that a new backend does not get right either is wrong for another reason.
    """
    after = shuffled(prepared)
    backend.plan(after.batch)
    backend.forward(after.layers[0], after.q.clone(), torch.empty_like(after.q))
    got = forward(backend, after, after.layers[1])
    wrong = explain(after, got)
    if wrong is not None:
        promise = "Each step and each layer is computed from its own batch and its own keys and values."
        seen = f"The first step was right. In the second, its requests have changed places. {wrong.seen}"
        raise alone(student, after) or Broken("kept", promise, seen)
    later = reallocated(prepared)
    backend.plan(later.batch)
    wrong = explain(later, forward(backend, later, later.layers[1]))
    if wrong is not None:
        promise = "Each step and each layer is computed from its own batch and its own keys and values."
        seen = (
            "Two steps were right. In the third, other requests have the pages: behind the first page of each row come "
            f"others, and all keys and values are new. {wrong.seen}"
        )
        raise alone(student, later) or Broken("kept", promise, seen)


def not_a_number(student: Student, prepared: PreparedCase) -> Broken | None:
    """Return the finding for an answer that is not a number even if all pages of the pool hold numbers."""
    for buffer in prepared.pool.layer(1):
        buffer.nan_to_num_()
    backend = bound(student, prepared)
    backend.plan(prepared.batch)
    if not forward(backend, prepared, prepared.layers[1]).isnan().any():
        return None
    promise = "Attention over scattered pages gives the answer of dense attention."
    seen = "An answer is not a number, although all keys and values are numbers."
    if prepared.q.dtype == torch.float16:
        return Broken("digits", promise, f"{seen} A score of 131,072 is too large for float16.")
    return Broken("nan", promise, seen)


def alone(student: Student, prepared: PreparedCase) -> Broken | None:
    """Return the finding for a step that is the first one of a new backend; None if its answer is right."""
    backend = bound(student, prepared)
    backend.plan(prepared.batch)
    return explain(prepared, forward(backend, prepared, prepared.layers[1]))


def run_steps(student: Student, workload: dict[str, Any]) -> None:
    """Grade a history of steps of two engines with three layers each. Both plan a step before either computes it."""
    engines = [AttentionSteps(workload, HEADS[3][1:], other) for other in range(2)]
    backends = []
    for engine in engines:
        backends.append(student.make(device=torch.device("cpu")))
        backends[-1].bind(engine.pool, engine.layers, [])
    for number, rows in enumerate(workload["steps"]):
        batches = [engine.step(rows) for engine in engines]
        planned = []
        for engine, backend, batch in zip(engines, backends, batches, strict=True):
            if batch is not None:
                q = engine.queries(engine.layers[0], batch)
                empty = PreparedCase(engine.pool, (engine.layers[0], engine.layers[0]), batch, q, torch.empty(0))
                untouched = Untouched(empty)
                backend.plan(batch)
                planned.append((engine, backend, batch, untouched))
        for engine, backend, batch, untouched in planned:
            for layer in engine.layers:
                check_layer(student, engine, backend, batch, layer, number)
            untouched.check()


def check_layer(
    student: Student, engine: AttentionSteps, backend: Any, batch: AttnBatch, layer: LayerSpec, number: int
) -> None:
    """Check the answer of one layer in step ``number`` of a history. Raise `Broken` if it is wrong."""
    layers: Any = (*engine.layers[: layer.index], *engine.layers[layer.index + 1 :], layer)
    step = PreparedCase(engine.pool, (layers[0], layer), batch, engine.queries(layer, batch), torch.empty(0))
    step = replace(step, expected=torch.cat([row.dense() for _, _, row in rows_of(step)]))
    wrong = explain(step, forward(backend, step, layer))
    if wrong is None:
        return
    fresh = student.make(device=torch.device("cpu"))
    fresh.bind(engine.pool, engine.layers, [])
    fresh.plan(batch)
    again = explain(step, forward(fresh, step, layer))
    promise = "Each step and each layer is computed from its own batch and its own keys and values."
    seen = f"In layer {layer.index} of step {number}: {wrong.seen} A new backend computes the right answer."
    raise again or Broken("kept", promise, seen, step=number)


def run_long_chunk(student: Student, workload: dict[str, Any]) -> None:
    """Grade a long chunk of a prompt, whose queries are 0: each gives the mean of the values that it attends to."""
    chunk, before, window, size = workload["chunk"], workload["before"], workload["window"], 256
    if chunk < 1 or before < 0:
        raise Invalid
    length, device = before + chunk, torch.device("cpu")
    pages = -(-length // size)
    layers = tuple(LayerSpec(i, 1, 1, 2, 1.0, window=window or -1) for i in range(2))
    pool = KVPool(2, pages + 1, size, 1, 2, torch.float32, device)
    keys, values = pool.layer(1)
    values.copy_(torch.rand(values.shape, generator=torch.Generator().manual_seed(chunk)))
    keys.fill_(1.0)
    table = torch.arange(pages - 1, -1, -1, dtype=torch.int32).repeat(2, 1)
    ends, lengths = np.array([0, chunk], np.int32), np.array([length], np.int32)
    on_device = torch.tensor(ends), torch.tensor(lengths)
    batch = AttnBatch(int(chunk == 1), ends, lengths, *on_device, torch.zeros(1, dtype=torch.int32), table)
    step = PreparedCase(pool, (layers[0], layers[1]), batch, torch.zeros(chunk, 1, 2), torch.empty(0))
    backend = bound(student, step)
    backend.plan(batch)
    got = forward(backend, step, layers[1])
    v = values[table[0].long()].reshape(-1, 2)[:length].double()
    sums = torch.cat((torch.zeros(1, 2).double(), v.cumsum(0)))

    def means(last: Tensor) -> Tensor:
        first = (last + 1 - window).clamp(min=0) if window else torch.zeros_like(last)
        return ((sums[last + 1] - sums[first]) / (last + 1 - first)[:, None])[:, None]

    query = torch.arange(chunk)
    want = means(before + query)
    if got.shape == want.shape and close(got, want, TOLERANCE):
        return
    promise = "Attention over scattered pages gives the answer of dense attention."
    if got.shape != want.shape:
        raise Broken("answer", promise, f"The result has the shape {list(got.shape)}, not {list(want.shape)}.")
    first = int((~torch.isclose(got, want, atol=TOLERANCE, rtol=TOLERANCE)).flatten(1).any(1).nonzero()[0])
    seen = f"In a chunk of {chunk} positions after {before} cached ones, the answer of query {first} is wrong."
    for block in BLOCKS:
        end = ((query // block + 1) * block).clamp(max=chunk)
        if close(got, means(length - end + query), TOLERANCE):
            text = f"{seen} Each block of {block} queries was taken for the row's last positions."
            raise Broken("blocks", promise, text)
    raise Broken("answer", promise, seen)


def reallocated(prepared: PreparedCase) -> PreparedCase:
    """Return a step with other pages behind each row's first page, and write new keys and values into the pool."""
    batch, size = prepared.batch, prepared.pool.page_size
    table = batch.page_table.clone()
    used = [range(1, -(-length // size)) for length in batch.seq_lens_cpu.tolist()]
    places = [
        (int(row), column) for row, columns in zip(batch.req_pool_indices, used, strict=True) for column in columns
    ]
    for (row, column), (other, place) in zip(places, [*places[1:], *places[:1]], strict=True):
        table[row, column] = batch.page_table[other, place]
    for buffer in prepared.pool.layer(1):
        buffer.neg_()
        buffer.copy_(buffer.flip(-1))
    later = replace(prepared, batch=replace(batch, page_table=table))
    return replace(later, expected=torch.cat([row.dense() for _, _, row in rows_of(later)]))


def run_gather(student: Student, workload: dict[str, Any]) -> None:
    """Grade `kv_locations` and `gather`, with undefined numbers in the page table."""
    prepared = drawn_case(workload)
    try:
        grade_gather(student, workload, prepared)
    except (Broken, Invalid):
        raise
    except Exception as error:
        raise undefined_pages(student, prepared, error) or error from error


def grade_gather(student: Student, workload: dict[str, Any], prepared: PreparedCase) -> None:
    """Grade `kv_locations` and `gather` on one step. A backend without these methods is graded as a whole."""
    backend = bound(student, prepared)
    backend.plan(prepared.batch)
    rows = getattr(backend, "rows", ())
    if (
        not hasattr(backend, "kv_locations")
        or not hasattr(backend, "gather")
        or len(rows) != len(prepared.batch.seq_lens_cpu)
    ):
        run_agree(student, workload)
        return
    promise = "The keys and values of a row are those of all its positions, in order, and of no others."
    size, layer = prepared.pool.page_size, prepared.layers[1]
    for r, (a, b, row) in enumerate(rows_of(prepared)):
        pages = prepared.batch.page_table[prepared.batch.req_pool_indices[r]]
        kv_locations = backend.kv_locations(pages, row.length)
        position = torch.arange(row.length)
        want = pages[position // size].long() * size + position % size
        if not same(kv_locations, want):
            given = pages, row.length
            if same(reloaded(student, prepared).kv_locations(*given), want):
                seen = (
                    f"The KV locations of a row of {row.length} positions are wrong. A newly loaded copy of the file "
                )
                text = "KV locations depend on the arguments and on the engine's own pool."
                raise Broken("kept", text, f"{seen}computes the right ones.")
            _check_length(len(kv_locations), row.length, b - a, size, promise, "kv_locations")
            raise wrong_location(torch.as_tensor(kv_locations).long(), want, *given, size, f"row {r}")
        check_gathered(backend.gather(layer, rows[r]), prepared, row, r)
    check_large_pages(backend, size)
    check_many_positions(backend, size, [*LENGTHS, *[VERY_LONG] * (len(workload["rows"]) > 20)])
    few = torch.tensor([4, 0, 2], dtype=torch.int32)
    check_one_device("kv_locations", [few], lambda: backend.kv_locations(few, 2 * size + 1))


def same(got: Any, want: Tensor) -> bool:
    """Return whether ``got`` are the KV locations ``want``, in any integer dtype."""
    return torch.equal(torch.as_tensor(got).long(), want)


def wrong_location(got: Tensor, want: Tensor, pages: Tensor, length: int, size: int, row: str) -> Broken:
    """Return the finding for wrong KV locations of ``length`` positions: the first wrong one, and why."""
    at = int((got != want).nonzero()[0])
    page, position = int(want[at]) // size, torch.arange(length)
    seen = f"Position {at} of {row} is at KV location {int(want[at])}, in page {page}; got {int(got[at])}. "
    seen += f"The page size is {size}."
    promise, numbers = "The KV location of a position is page · page_size + offset.", pages.long()
    others = [numbers[position // size] + position % size, numbers[position // size] * size, numbers[position // size]]
    fixed = (1, 2, 4, 8, 12, 16, 32, 64)
    others += [numbers[(position // n).clamp(max=len(pages) - 1)] * n + position % n for n in fixed]
    if any(torch.equal(got, other) for other in others):
        return Broken("location", promise, seen, page=page)
    promise = "The keys and values of a row are those of all its positions, in order, and of no others."
    return Broken("pages", promise, seen, page=page)


def check_gathered(gathered: Any, prepared: PreparedCase, row: Row, number: int) -> None:
    """Check the keys and values that `gather` returned for a row of the step."""
    layer, size, queries = prepared.layers[1], prepared.pool.page_size, len(row.q)
    promise = "`gather` returns the row's keys and values, each [length, kv_heads, head_dim]."
    right = row.k[: row.length], row.v[: row.length]
    for i, name in enumerate(("keys", "values")):
        mine = gathered[i]
        if mine.shape[1:] != right[i].shape[1:]:
            seen = f"The {name} of row {number} have the shape {list(mine.shape)}, not {list(right[i].shape)}."
            raise Broken("gather", promise, seen)
        _check_length(len(mine), row.length, queries, size, promise, name)
        if torch.equal(mine, right[i]):
            continue
        seen = f"The {name} of row {number} are not those that layer {layer.index} has at the row's KV locations."
        if torch.equal(mine, right[1 - i]):
            seen = f"The {name} of row {number} are its {('values', 'keys')[i]}."
        raise Broken("gather", promise, seen)


def check_large_pages(backend: Any, size: int) -> None:
    """Check `kv_locations` for a page whose KV locations are above 2^31, as in a large pool of small pages."""
    page = 2**31 // size + 5  # the product page · size has 33 bits
    if page >= 2**31:  # pages of one token: no page number of 32 bits is so large
        return
    got = [int(location) for location in backend.kv_locations(torch.tensor([page], dtype=torch.int32), size)]
    if got[:1] != [page * size]:  # a wrong offset or a wrong number of locations is found below
        wrapped = (page * size + 2**31) % 2**32 - 2**31
        seen = f"With {size} tokens a page, the first KV location of page {page} is {page * size}; got {got[0]}."
        promise, show = "A KV location is page · page_size + offset, in 64 bits.", f"`kv_locations` alone: page {page}"
        raise Broken("overflow" if got[:1] == [wrapped] else "location", promise, seen, page=page, show=show)


def check_many_positions(backend: Any, size: int, lengths: Sequence[int]) -> None:
    """Check `kv_locations` of long rows."""
    promise = "`kv_locations` returns the KV location of each of the row's positions, in order."
    for length in lengths:
        pages = torch.arange(-(-length // size), dtype=torch.int32).flip(0) + 1
        sizes = f"{amount(length, 'position')} in pages of {amount(size, 'token')}"
        show = f"`kv_locations` alone: a row of {sizes}, with falling page numbers"
        got = torch.as_tensor(backend.kv_locations(pages, length))
        position = torch.arange(length)
        want = pages[position // size].long() * size + position % size
        if got.shape != want.shape:
            cause = "tail" if len(got) == len(pages) * size else "long" if length > 1 else "kept"
            seen = f"A row of {length} positions got {len(got)} KV locations."
            raise Broken(cause, promise, seen, show=show)
        if not torch.equal(got.long(), want):
            at = int((got.long() != want).nonzero()[0])
            seen = f"Position {at} of {length} is at KV location {int(want[at])}; got {int(got[at])}."
            in_a_row = torch.equal(got.long(), int(pages[0]) * size + position)
            # A short row that is wrong now was right above, with other pages.
            cause = "pages" if in_a_row or at < min(length, 64) else "long"
            raise Broken(cause if length > 1 else "kept", promise, seen, show=show)


def _check_length(got: int, length: int, queries: int, size: int, promise: str, what: str) -> None:
    """Raise `Broken` if a row of ``length`` positions got another number of KV locations or keys."""
    if got == length:
        return
    cause = "tail" if got == -(-length // size) * size else "prefix" if got == queries else "pages"
    seen = f"A row of {length} positions, of which this step computes {queries}, got {got} {what}."
    raise Broken(cause, promise, seen)


def run_mask(student: Student, workload: dict[str, Any]) -> None:
    """Grade `attention_mask` alone. A backend without this method is graded as a whole."""
    case = case_of(workload)
    prepared = prepare_case(case, seed=workload["seed"])
    backend = bound(student, prepared)
    if not hasattr(backend, "attention_mask"):
        run_agree(student, workload)
        return
    check_device(backend)
    if len(workload["rows"]) > 20:
        check_long_masks(backend)
    for a, b, row in rows_of(prepared):
        mine = backend.attention_mask(b - a, row.length, case.window, torch.device("cpu"))
        want = row.mask(case.window)
        literal = want & (torch.arange(row.length) > row.length - (b - a) + torch.arange(b - a)[:, None] + 1)
        if mine.shape == want.shape and torch.equal(mine.bool(), want):
            continue
        others = {
            "top-left": row.mask(case.window, shift=0),
            "no-mask": torch.ones_like(want),
            "self": row.mask(case.window, strict=True),
            "window": row.mask(),
        }
        if case.window < 0:  # a window of -1 taken for a window
            others = {"no-window": literal, **others}
        same = [n for n, o in others.items() if mine.shape == o.shape and torch.equal(mine.bool(), o)]
        cause = same[0] if len(same) == 1 else likely_mistake(backend, same, case.window)
        cause = cause or ("window" if case.window >= 0 else "top-left")
        seen = f"The mask of {_sizes(b - a, row.length)} {picture_of(mine, want)}"
        raise Broken(cause, mask_promise(case.window), seen)
    check_kept_masks(student, prepared, backend)


def mask_promise(window: int) -> str:
    """Return what a mask with this window must be, in one sentence."""
    seen = "all earlier positions" if window < 0 else f"the {window - 1} positions before it"
    return f"The queries are the row's last positions. With window={window}, each sees its own position and {seen}."


def picture_of(mine: Any, want: Tensor) -> str:
    """Return the first lines of a wrong mask and of the right one, as the end of a sentence."""
    if mine.shape != want.shape:
        return f"has the shape {list(mine.shape)}, not {list(want.shape)}."
    wrong = (mine.bool() != want).any(1).nonzero().flatten().tolist()[0]
    lines = ("".join("x" if x else "." for x in line) for line in (mine.bool()[wrong].tolist(), want[wrong].tolist()))
    return f"has for query {wrong} the line {next(lines)}; it should be {next(lines)}."


def likely_mistake(backend: Any, causes: Sequence[str], window: int) -> str | None:
    """Return which of the mistakes ``causes`` also explains the mask of 3 queries over 7 positions, or None.

    With one query, several mistakes give the same mask.
    """
    key = torch.arange(7)
    last, first = key[4:, None], key[:3, None]
    limits = [key > query - window if window >= 0 else key >= 0 for query in (last, first)]
    masks = {
        "top-left": (key <= first) & limits[1],
        "no-mask": torch.ones(3, 7, dtype=torch.bool),
        "self": (key < last) & limits[0],
        "window": key <= last,
    }
    mine = backend.attention_mask(3, 7, window, torch.device("cpu"))
    return next((c for c in causes if mine.shape == (3, 7) and torch.equal(mine.bool(), masks[c])), None)


def check_device(backend: Any) -> None:
    """Check that `attention_mask` makes its tensors on the device that is asked for.

    Nothing can be made on the device "vulkan" here: code that uses the argument raises an error.
    """
    try:
        mask = backend.attention_mask(2, 5, -1, torch.device("vulkan"))
    except Exception:
        return
    seen = f"Asked for a mask on another device, `attention_mask` returned one on the device {mask.device}."
    raise Broken("device", "Tensors that a backend makes are on the device of its inputs.", seen)


def check_long_masks(backend: Any) -> None:
    """Check masks of long rows and of long chunks."""
    for queries, length, window in (
        (1, 40_000, 64),
        (2, 9000, -1),
        (3, 70_000, 5000),
        (2600, 2700, 1100),
        (1, VERY_LONG, -1),
    ):
        mine = backend.attention_mask(queries, length, window, torch.device("cpu"))
        key = torch.arange(length)
        query = key[length - queries :, None]
        want = (key <= query) & (key > query - window) if window >= 0 else key <= query
        if mine.shape != want.shape or not torch.equal(mine.bool(), want):
            show = f"`attention_mask` alone: {_sizes(queries, length)} with window={window}"
            raise Broken("long", mask_promise(window), "The mask is wrong.", show=show)


def _sizes(queries: int, positions: int) -> str:
    """Return the sizes of a mask in words."""
    return f"{queries} {'query' if queries == 1 else 'queries'} over {amount(positions, 'position')}"


def check_kept_masks(student: Student, prepared: PreparedCase, backend: Any) -> None:
    """Check masks of the same sizes with other windows, as layers with other windows ask for them."""
    for a, b, row in [*rows_of(prepared)][:3]:
        for window in (-1, 2, 5, 1, -1):
            given, want = (b - a, row.length, window, torch.device("cpu")), row.mask(window)
            mine = backend.attention_mask(*given)
            if torch.equal(mine.bool(), want):
                continue
            show = f"`attention_mask` alone: {_sizes(b - a, row.length)} with window={window}"
            seen = f"The mask {picture_of(mine, want)}"
            if torch.equal(bound(student, prepared).attention_mask(*given).bool(), want):
                promise = "A mask depends on its arguments alone: layers may have other windows."
                raise Broken("kept", promise, f"{seen} A new backend makes the right mask.", show=show)
            raise Broken("window" if window >= 0 else "no-window", mask_promise(window), seen, show=show)


# ---- counting reads -------------------------------------------------------------------------------------------

_GATHERS = ("__getitem__", "index_select", "gather", "take", "take_along_dim", "embedding")


class Reads(TorchFunctionMode):
    """A torch function mode that counts the elements that torch functions read from a pool's memory."""

    def __init__(self, pool: Any):
        super().__init__()
        self.memory = {buffer.untyped_storage().data_ptr() for i in range(2) for buffer in pool.layer(i)}
        self.numbers = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        flat = [y for x in args for y in (x if isinstance(x, (list, tuple)) else [x])]  # torch.cat has a list
        given = [x for x in flat if isinstance(x, Tensor) and self._ours(x)]
        if given and isinstance(made, Tensor) and not self._ours(made):
            gathers = getattr(function, "__name__", "") in _GATHERS
            self.numbers += made.numel() if gathers else sum(_distinct(x) for x in given)
        return made

    def _ours(self, x: Tensor) -> bool:
        return x.untyped_storage().data_ptr() in self.memory


def _distinct(x: Tensor) -> int:
    """Return the number of distinct elements of a view: broadcast elements count once."""
    return int(np.prod([n for n, stride in zip(x.shape, x.stride(), strict=True) if stride]))


def count(student: Student) -> str:
    """Count the KV positions that attention reads in a step with rows of very different lengths.

    The right number is the sum of the lengths, not the longest length times the number of rows. Reading the rest of
    each row's last page is allowed too.
    """
    rng = student.random
    rows = [[rng.randint(300, 600), 1], *([rng.randint(0, 30), 1] for _ in range(12)), [0, rng.randint(20, 60)]]
    case = case_of({"rows": rows, "page_size": 16, "heads": 1, "seed": 0, "window": 0, "cap": 0, "half": 0})
    prepared = prepare_case(case, seed=rng.randrange(1000))
    backend = bound(student, prepared)
    backend.plan(prepared.batch)
    with Reads(prepared.pool) as reads:
        prepared.forward(backend)
    lengths = prepared.batch.seq_lens_cpu
    each = 2 * case.kv_heads * case.head_dim
    read, total = reads.numbers // each, int(lengths.sum())
    whole = int((-(-lengths // 16) * 16).sum())  # reading each row's whole last page is allowed
    padded = len(lengths) * int(lengths.max())
    if read > whole:
        seen = f"{read} positions were read; the rows have {total} in all, and {padded} if padded to the longest row."
        raise Broken("padded", "The number of KV positions read is the sum of the rows' lengths.", seen)
    if read < total:
        seen = f"Only {read} positions were read; the rows have {total} in all."
        raise Broken("prefix", "The number of KV positions read is the sum of the rows' lengths.", seen)
    return f"{read} KV positions read, the sum of the lengths; padded to the longest row: {padded}"


def attention_kit() -> type:
    """Import and return the conformance kit of attention backends."""
    from minisgl.testing.attention import AttentionConformance

    return AttentionConformance


def backend_of(student: Student) -> Any:
    """Return the student's backend."""
    return student.make(device=torch.device("cpu"))


def _part(name: str, says: str, run: Callable[[Student, dict[str, Any]], None], seconds: float = 0.5) -> Gate:
    workloads = make_attend if run is run_agree else make
    # The first 11 workloads of `make_attend` are not random: each shows a kind of mistake that the others may miss.
    at_least = 11 if run is run_agree else 1
    graded = search(workloads, run, seconds=seconds, at_least=at_least, show=draw)
    return Gate(name, says, graded, part=f"paged.{name}", limit=30.0)  # a right solution may loop over pages


GATES: Sequence[Gate] = (
    _part("gather", "each row gets its own keys and values from scattered pages", run_gather),
    _part("mask", "each query sees the right positions", run_mask),
    _part("attend", "the answer equals the answer of dense attention", run_agree, seconds=1.2),
    conformance(attention_kit, backend_of, causes=lambda text: "answer" if "off by" in text else None),
    Gate("count", "the number of KV positions read is the sum of the lengths", count),
    greedy(["attention=torch"], ["max_prefill_tokens=32"]),
    facts(["plan", "forward"]),
)


MOST_OPERATIONS = 20


def measure_stretch(student: Student) -> tuple[str, bool]:
    """Count the torch operations of the student's attention in a decode step."""
    operations, left = operations_of_a_decode_step(student)
    counted = f"{operations} operations" + (f", but `{left}` leaves torch" if left else "")
    return counted, operations <= MOST_OPERATIONS and not left


STRETCH = Stretch(
    f"For a decode step of {ROWS} rows, `plan` and one layer of `paged` take 336 torch operations, views not counted. "
    f"Take at most {MOST_OPERATIONS}.",
    measure_stretch,
)

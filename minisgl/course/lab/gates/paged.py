"""Lab `paged`: pages are shuffled and the others poisoned; a wrong answer is held against the answers that known
mistakes would give, and a dispatch mode counts what is read of the pool.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from minisgl.attention import LayerSpec
from minisgl.course.lab.grader.conformance import conformance, greedy
from minisgl.course.lab.grader.gate import Broken, Gate, Invalid, Student
from minisgl.course.lab.grader.search import search
from minisgl.course.lab.grader.server_gate import facts
from minisgl.testing.attention import AttentionCase, Laid, lay_out

HEADS = ((2, 2, 8), (4, 2, 16), (4, 1, 8), (6, 3, 16))
RIGHT = 1e-4  # float32 against float64
RIGHT_IN_HALF = 2e-2  # bfloat16 has 8 bits: the answer's own rounding is 4e-3
LOUD = 8.0  # what scores are scaled by in half precision, so that a rounded one shows
UNWRITTEN = 12288.0  # in bfloat16 too


def make(rng: random.Random, size: int) -> dict[str, Any]:
    """Rows that decode, rows that prefill, some behind a cached prefix. Small at first."""
    most = (3, 5, 9, 17, 40)[min(size // 4, 4)]
    rows = [
        [rng.randint(0, most), 1 if rng.random() < 0.5 else rng.randint(2, most)]
        for _ in range(rng.randint(1, 1 + size // 3))
    ]
    more = {"page_size": rng.choice([1, 2, 4, 16]), "heads": rng.randrange(len(HEADS)), "seed": rng.randrange(1000)}
    window = rng.choice([0, 0, 0, 1, 3, 10]) if size > 6 else 0
    cap, half = int(size > 6 and rng.random() < 0.2), int(size > 8 and rng.random() < 0.2)
    return {"rows": rows, **more, "window": window, "cap": cap, "half": half}


def case_of(workload: dict[str, Any]) -> AttentionCase:
    """The workload as a case of the kit. Raises `Invalid`."""
    rows = [(before, count) for before, count in workload["rows"]]
    if not rows or workload["page_size"] < 1 or any(count < 1 or before < 0 for before, count in rows):
        raise Invalid
    rows.sort(key=lambda row: row[1] != 1)  # rows of one token come first
    q, kv, dim = HEADS[workload["heads"]]
    window, cap = workload["window"] or -1, 2.0 * workload["cap"]
    dtype = torch.bfloat16 if workload["half"] else torch.float32
    return AttentionCase(tuple(rows), workload["page_size"], q, kv, dim, window=window, soft_cap=cap, dtype=dtype)


def draw(workload: dict[str, Any]) -> str:
    """The workload in a few lines."""
    q, kv, dim = HEADS[workload["heads"]]
    more = f", window {workload['window']}" * bool(workload["window"]) + ", scores capped at 2" * workload["cap"]
    more += ", in bfloat16" * workload["half"]
    lines = [f"pages of {workload['page_size']} tokens, {q} query and {kv} key-value heads of {dim}{more}"]
    for before, count in sorted(workload["rows"], key=lambda row: row[1] != 1):
        lines.append(f"a row with {before} positions in the cache that computes {count}")
    return "\n".join(lines)


# ---- what known mistakes would answer ------------------------------------------------------------------------


@dataclass
class Row:
    """One row of a case: its queries, and the keys and values of all its pages, the last page's tail included."""

    q: Tensor
    k: Tensor
    v: Tensor
    length: int
    layer: LayerSpec

    def dense(
        self, *, seen: Tensor | None = None, first: int = 0, last: int | None = None, repeat: bool = False, **other: Any
    ) -> Tensor:
        """Attention in float64 over positions ``first`` to ``last``, seen as the mask says."""
        spec, last = self.layer, last if last is not None else self.length
        group = spec.q_heads // spec.kv_heads
        k, v = (x[first:last].double() for x in (self.k, self.v))
        widen = (lambda x: x.repeat(1, group, 1)) if repeat else (lambda x: x.repeat_interleave(group, dim=1))
        scores = torch.einsum("qhd,khd->hqk", self.q.double(), widen(k)) * other.get("scale", spec.scale)
        cap = other.get("cap", spec.soft_cap)
        if seen is None:
            seen = self.mask(window=other.get("window", spec.window))[:, first:last]
        if cap:
            scores = cap * torch.tanh(scores / cap)
            if other.get("late"):  # minus infinity was there before, and became minus cap
                scores, seen = scores.masked_fill(~seen, -cap), torch.ones_like(seen)
        if other.get("zeroed"):
            return torch.einsum("hqk,khd->qhd", scores.softmax(-1) * seen, widen(v))
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), widen(v))

    def mask(self, window: int = -1, shift: int | None = None, strict: bool = False) -> Tensor:
        """[queries, length]; ``shift`` is the position of the first query."""
        queries, key = len(self.q), torch.arange(self.length)
        at = (self.length - queries if shift is None else shift) + torch.arange(queries)[:, None]
        seen = key < at if strict else key <= at
        return seen & (key > at - window) if window >= 0 else seen

    def mistakes(self) -> Iterator[tuple[str, Tensor]]:
        """Cause → what one would get."""
        queries, whole, spec = len(self.q), len(self.k), self.layer
        before = self.length - queries
        window = spec.window
        yield "top-left", self.dense(seen=self.mask(window, shift=0))
        tail = torch.ones(queries, whole - self.length, dtype=torch.bool)
        yield "tail", self.dense(seen=torch.cat((self.mask(window), tail), 1), last=whole)
        yield "no-mask", self.dense(seen=torch.ones(queries, self.length, dtype=torch.bool))
        yield "no-mask", self.dense(seen=torch.ones(queries, whole, dtype=torch.bool), last=whole)
        yield "prefix", self.dense(seen=self.mask(window)[:, before:], first=before)
        yield "prefix", self.dense(seen=self.mask(window, shift=0)[:, :queries], last=queries)
        yield "groups", self.dense(repeat=True)
        yield "scale", self.dense(scale=1.0)
        yield "scale", self.dense(scale=spec.head_dim**-1.0)
        yield "zeroed", self.dense(zeroed=True)
        if before or queries > 1:
            yield "self", self.dense(seen=self.mask(window, strict=True))
        if window >= 0:
            for other in (-1, window + 1, window - 1):
                yield "window", self.dense(window=other)
        if spec.soft_cap:
            yield "cap", self.dense(cap=0.0)
            yield "cap", self.dense(late=True)


def rows_of(laid: Laid) -> Iterator[tuple[int, int, Row]]:
    """(first token, last token, row) of each row."""
    batch, layer = laid.batch, laid.layers[1]
    keys, values = laid.pool.layer(1)
    ends, size = batch.cu_seqlens_q_cpu.tolist(), laid.pool.page_size
    for r, length in enumerate(batch.seq_lens_cpu.tolist()):
        pages = batch.page_table[batch.req_pool_indices[r], : -(-length // size)].long()
        k, v = keys[pages].flatten(0, 1), values[pages].flatten(0, 1)
        yield ends[r], ends[r + 1], Row(laid.q[ends[r] : ends[r + 1]], k, v, length, layer)


def explain(laid: Laid, got: Tensor) -> Broken | None:
    """Which row is wrong, and which mistake gives just that answer."""
    half = laid.q.dtype != torch.float32
    right = RIGHT_IN_HALF if half else RIGHT
    for number, (a, b, row) in enumerate(rows_of(laid)):
        mine, want = got[a:b], laid.want[a:b]
        if close(mine, want, right):
            continue
        if mine.isnan().any():
            cause, off = "pages", "not a number: it read a page that is nobody's"
        else:
            likely = (name for name, other in row.mistakes() if close(mine, other, right))
            near = half and bool((mine - want).abs().mean() < 0.2)
            cause = next(likely, "digits" if near else "answer")
            off = f"off by {(mine - want).abs().max():.2g}"
        seen = f"Row {number} ({row.length} positions, of which it computes {b - a}) is {off}."
        return Broken(cause, "Scattered pages, the same answer as dense attention.", seen)
    return None


def close(a: Tensor, b: Tensor, right: float) -> bool:
    return a.shape == b.shape and bool(torch.isclose(a, b, atol=right, rtol=right).all())


def laid_out(workload: dict[str, Any]) -> Laid:
    """The workload's step. In half precision scores are large, as trained models have them: there a score that was
    rounded before the softmax is another weight after it."""
    laid = lay_out(case_of(workload), seed=workload["seed"])
    if not workload["half"]:
        return laid
    loud = replace(laid.layers[1], scale=LOUD * laid.layers[1].scale)
    laid = replace(laid, layers=(laid.layers[0], loud))
    return replace(laid, want=torch.cat([row.dense() for _, _, row in rows_of(laid)]))


# ---- gates -------------------------------------------------------------------------------------------------


def bound(student: Student, laid: Laid) -> Any:
    """The student's backend, bound to the case's pool."""
    backend = student.make(device=torch.device("cpu"))
    backend.bind(laid.pool, laid.layers, [])
    return backend


def run_agree(student: Student, workload: dict[str, Any]) -> None:
    """The whole backend on one step."""
    laid = laid_out(workload)
    backend = bound(student, laid)
    backend.plan(laid.batch)
    out = torch.full_like(laid.q, UNWRITTEN)
    got = backend.forward(laid.layers[1], laid.q, out).double()
    if got.shape != laid.want.shape:
        raise Broken("answer", "The result has the shape of the queries.", f"It is {list(got.shape)}.")
    for number, (a, b, row) in enumerate(rows_of(laid)):
        if bool((got[a:b] == UNWRITTEN).any()):
            seen = f"In row {number} ({row.length} positions, of which it computes {b - a}) something is not written."
            raise Broken("unwritten", "Every row of `out` is written: those that decode and those that prefill.", seen)
    wrong = explain(laid, got)
    if wrong is not None:
        raise wrong


def run_gather(student: Student, workload: dict[str, Any]) -> None:
    """Places and gathers alone; a backend that is built otherwise is tried whole."""
    laid = lay_out(case_of(workload), seed=workload["seed"])
    backend = bound(student, laid)
    backend.plan(laid.batch)
    rows = getattr(backend, "rows", ())
    if not hasattr(backend, "places") or not hasattr(backend, "gather") or len(rows) != len(laid.batch.seq_lens_cpu):
        run_agree(student, workload)
        return
    promise = "A row's keys and values are those of all its positions, in order, and no others."
    size, layer = laid.pool.page_size, laid.layers[1]
    for r, (a, b, row) in enumerate(rows_of(laid)):
        pages = laid.batch.page_table[laid.batch.req_pool_indices[r]]
        places = backend.places(pages, row.length)
        position = torch.arange(row.length)
        want = pages[position // size].long() * size + position % size
        _check_length(len(places), row.length, b - a, size, promise, "places")
        if not torch.equal(torch.as_tensor(places).long(), want):
            at = int((torch.as_tensor(places).long() != want).nonzero()[0])
            seen = (
                f"Position {at} of row {r} is in page {int(want[at]) // size}; `places` says place {int(places[at])}."
            )
            raise Broken("pages", promise, seen, page=int(want[at]) // size)
        k, v = backend.gather(layer, rows[r])
        _check_length(len(k), row.length, b - a, size, promise, "keys")
        for name, mine, right in (("keys", k, row.k), ("values", v, row.v)):
            if not torch.equal(mine, right[: row.length]):
                text = f"Row {r}: the {name} are not the ones of layer {layer.index} at its places."
                raise Broken("pages", promise, text)


def _check_length(got: int, length: int, queries: int, size: int, promise: str, what: str) -> None:
    if got == length:
        return
    cause = "tail" if got == -(-length // size) * size else "prefix" if got == queries else "pages"
    raise Broken(cause, promise, f"There are {got} {what} for {length} positions, of which {queries} are computed.")


def run_mask(student: Student, workload: dict[str, Any]) -> None:
    """The mask alone."""
    case = case_of(workload)
    laid = lay_out(case, seed=workload["seed"])
    backend = bound(student, laid)
    if not hasattr(backend, "seen"):
        run_agree(student, workload)
        return
    for a, b, row in rows_of(laid):
        mine = backend.seen(b - a, row.length, case.window, torch.device("cpu"))
        want = row.mask(case.window)
        if mine.shape == want.shape and torch.equal(mine.bool(), want):
            continue
        others = {
            "top-left": row.mask(case.window, shift=0),
            "no-mask": torch.ones_like(want),
            "self": row.mask(case.window, strict=True),
            "window": row.mask(),
        }
        cause = next((n for n, o in others.items() if mine.shape == o.shape and torch.equal(mine.bool(), o)), None)
        cause = cause or ("window" if case.window >= 0 else "top-left")
        picture = " / ".join("".join("x" if x else "." for x in line) for line in mine.bool().tolist()[:4])
        right = " / ".join("".join("x" if x else "." for x in line) for line in want.tolist()[:4])
        seen = f"{b - a} queries over {row.length} positions: {picture}, and it should be {right}."
        raise Broken(cause, "A query sees itself and what came before, and the queries are the last positions.", seen)


# ---- what is read ---------------------------------------------------------------------------------------------

_GATHERS = ("__getitem__", "index_select", "gather", "take", "take_along_dim", "embedding")


class Reads(TorchFunctionMode):
    """Counts the numbers that torch's functions read of a pool's memory."""

    def __init__(self, pool: Any):
        super().__init__()
        self.memory = {buffer.untyped_storage().data_ptr() for i in range(2) for buffer in pool.layer(i)}
        self.numbers = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        given = [x for x in args if isinstance(x, Tensor) and self._ours(x)]
        if given and isinstance(made, Tensor) and not self._ours(made):
            gathers = getattr(function, "__name__", "") in _GATHERS
            self.numbers += made.numel() if gathers else sum(_distinct(x) for x in given)
        return made

    def _ours(self, x: Tensor) -> bool:
        return x.untyped_storage().data_ptr() in self.memory


def _distinct(x: Tensor) -> int:
    """Elements of a view, those that were only repeated counted once."""
    return int(np.prod([n for n, stride in zip(x.shape, x.stride(), strict=True) if stride]))


def count(student: Student) -> str:
    """Rows of very different lengths: what is read is the sum of the lengths, not the longest times the rows."""
    rng = student.random
    rows = [[rng.randint(300, 600), 1], *([rng.randint(0, 30), 1] for _ in range(12)), [0, rng.randint(20, 60)]]
    case = case_of({"rows": rows, "page_size": 16, "heads": 1, "seed": 0, "window": 0, "cap": 0, "half": 0})
    laid = lay_out(case, seed=rng.randrange(1000))
    backend = bound(student, laid)
    backend.plan(laid.batch)
    with Reads(laid.pool) as reads:
        laid.forward(backend)
    lengths = laid.batch.seq_lens_cpu
    each = 2 * case.kv_heads * case.head_dim
    read, total = reads.numbers // each, int(lengths.sum())
    whole = int((-(-lengths // 16) * 16).sum())  # the whole of each last page is fine too
    padded = len(lengths) * int(lengths.max())
    if read > whole:
        seen = f"{read} positions were read for rows of {total}; padded to the longest they are {padded}."
        raise Broken("padded", "KV positions read are the sum of the rows' lengths.", seen)
    if read < total:
        seen = f"Only {read} positions were read, and the rows have {total}."
        raise Broken("prefix", "KV positions read are the sum of the rows' lengths.", seen)
    return f"{read} KV positions read, the sum of the lengths; padded to the longest: {padded}"


def attention_kit() -> type:
    from minisgl.testing.attention import AttentionConformance

    return AttentionConformance


def backend_of(student: Student) -> Any:
    return student.make(device=torch.device("cpu"))


def _part(name: str, says: str, run: Callable[[Student, dict[str, Any]], None]) -> Gate:
    return Gate(name, says, search(make, run, seconds=0.5, show=draw), part=f"paged.{name}")


GATES: Sequence[Gate] = (
    _part("gather", "each row's keys and values, from scattered pages", run_gather),
    _part("mask", "who sees what", run_mask),
    _part("attend", "the answer of dense attention", run_agree),
    conformance(attention_kit, backend_of, causes=lambda text: "answer" if "off by" in text else None),
    Gate("count", "KV positions read are the sum of the lengths", count),
    greedy(["attention=torch"], ["max_prefill_tokens=32"]),
    facts(["plan", "forward"]),
)

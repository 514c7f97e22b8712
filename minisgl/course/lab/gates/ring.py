"""Lab `ring`: ranks on a wire that shows every message, then over gloo, in the engine and in the real server."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minisgl.course.lab.grader.conformance import conformance
from minisgl.course.lab.grader.gate import Broken, Gate, Invalid, Student
from minisgl.course.lab.grader.search import search
from minisgl.course.lab.grader.server_gate import facts
from minisgl.testing.communicator import CommunicatorConformance
from minisgl.testing.ranks import run_ranks
from minisgl.testing.wire import RULES, Wire, WireViolation

CPU = torch.device("cpu")
SERVER = ["tp=2"]
MOST = 5
"""Ranks that are tried."""

Work = Callable[[Any], Any]


def on_wire(student: Student, ranks: int, work: Work) -> tuple[list[Any], Wire]:
    """``work`` on the student's communicator of each rank; what came out, and what was sent. Raises `Broken`."""
    if not 2 <= ranks <= MOST:
        raise Invalid
    wire = Wire(ranks)
    try:
        made = wire.run(lambda rank, size: student.make(rank=rank, size=size, address="", device=CPU), work)
    except WireViolation as error:
        cause = {"changed": "early", "unwaited": "early", "left": "sizes", "neighbour": "order"}
        raise Broken(cause.get(error.rule, error.rule), RULES[error.rule], error.text) from error
    return made, wire


def has(student: Student, method: str) -> bool:
    """Whether the student's communicator has the method that the skeleton has."""
    return hasattr(student.make(rank=0, size=1, address="", device=CPU), method)


def votes(ranks: int, length: int) -> list[Tensor]:
    """A tensor for each rank whose sum tells, digit by digit in base 8, how often each rank's part is in it."""
    return [torch.full((length,), 8**rank, dtype=torch.int64) for rank in range(ranks)]


def counted(x: int, ranks: int) -> list[int]:
    """How often each rank's part is in one element of a sum of `votes`."""
    return [x // 8**rank % 8 for rank in range(ranks)]


def randoms(ranks: int, length: int) -> list[Tensor]:
    """Whole numbers, so that the sum does not depend on its order."""
    generator = torch.Generator().manual_seed(length)
    return [torch.randint(-99, 100, (length,), generator=generator).float() for _ in range(ranks)]


# ---- the parts -------------------------------------------------------------------------------------------


def make_chunks(rng: random.Random, size: int) -> dict[str, Any]:
    most = min(2 + size // 4, MOST)
    return {"chunks": [rng.randint(0, 1 + size // 3) for _ in range(rng.randint(2, most))]}


def show_chunks(workload: dict[str, Any]) -> str:
    return f"{len(workload['chunks'])} ranks, chunks of {workload['chunks']} elements"


def run_swap(student: Student, workload: dict[str, Any]) -> None:
    lengths = workload["chunks"]
    n = len(lengths)
    if not has(student, "swap"):
        return all_reduce(student, n, sum(lengths))

    def work(comm: Any) -> Tensor:
        incoming = torch.full((lengths[comm.rank - 1],), -1.0)
        comm.swap(torch.full((lengths[comm.rank],), float(comm.rank)), incoming)
        return incoming

    got, _ = on_wire(student, n, work)
    for rank, incoming in enumerate(got):
        left = (rank - 1) % n
        if not bool((incoming == left).all()):
            seen = f"Rank {rank} of {n} holds {incoming.tolist()[:6]} afterwards; its left neighbour is rank {left}."
            raise Broken("order", "Each rank sends to its right and receives from its left.", seen)


def run_reduce_scatter(student: Student, workload: dict[str, Any]) -> None:
    lengths = workload["chunks"]
    n = len(lengths)
    if not has(student, "reduce_scatter"):
        return all_reduce(student, n, sum(lengths))
    for parts in (votes(n, sum(lengths)), randoms(n, sum(lengths))):

        def work(comm: Any, parts: Sequence[Tensor] = parts) -> list[Tensor]:
            chunks = list(parts[comm.rank].clone().split(lengths))
            comm.reduce_scatter(chunks)
            return chunks

        got, _ = on_wire(student, n, work)
        want = torch.stack(list(parts)).sum(0).split(lengths)
        for rank, chunks in enumerate(got):
            if not torch.equal(chunks[rank], want[rank]):
                raise wrong_chunk(rank, got, want, parts)


def wrong_chunk(rank: int, got: Sequence[list[Tensor]], want: Sequence[Tensor], parts: Sequence[Tensor]) -> Broken:
    """Why chunk ``rank`` of that rank is not the sum."""
    promise, n = "After reduce_scatter, rank r's chunk r is the sum of all ranks' chunks r.", len(want)
    chunks = got[rank]
    for other in range(n):
        for i in range(n):
            if i != other and len(want[i]) and torch.equal(got[other][i], want[i]):
                seen = f"On rank {other} of {n}, chunk {i} is complete, and chunk {other} should be."
                return Broken("order", promise, seen)
    if parts[0].dtype != torch.int64:
        return Broken("order", promise, f"On rank {rank} of {n}, chunk {rank} has all parts, of other elements.")
    return misadded(f"chunk {rank} of rank {rank}", int(chunks[rank][0]), n, promise)


def misadded(what: str, value: int, n: int, promise: str) -> Broken:
    """Which parts are missing from a sum of `votes`, or are in it twice."""
    times = counted(value, n)
    twice = [rank for rank, count in enumerate(times) if count > 1]
    missing = [rank for rank, count in enumerate(times) if count == 0]
    if twice:
        seen = f"In {what}, {ranks_named(twice)} {'is' if len(twice) == 1 else 'are'} more than once."
        return Broken("twice", promise, seen)
    return Broken("missing", promise, f"In {what}, the part of {ranks_named(missing)} is missing ({n} ranks).")


def ranks_named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


def run_circulate(student: Student, workload: dict[str, Any]) -> None:
    lengths = workload["chunks"]
    n = len(lengths)
    if not has(student, "circulate"):
        return all_reduce(student, n, sum(lengths))

    def work(comm: Any) -> list[Tensor]:
        chunks = [torch.full((length,), 8 * i if i == comm.rank else -1) for i, length in enumerate(lengths)]
        comm.circulate(chunks)
        return chunks

    got, _ = on_wire(student, n, work)
    for rank, chunks in enumerate(got):
        for i, chunk in enumerate(chunks):
            if bool((chunk == 8 * i).all()):
                continue
            promise, place = "After circulate, every rank holds every rank's finished chunk.", f"the place of chunk {i}"
            found = int(chunk[0])
            if found == 8 * i - 1:
                seen = f"On rank {rank} of {n}, in {place}, it was added to what stood there before."
                raise Broken("twice", promise, seen)
            holds = "what it held before" if found < 0 else f"chunk {found // 8}"
            raise Broken("order", promise, f"On rank {rank} of {n}, {place} holds {holds}.")


# ---- the whole -------------------------------------------------------------------------------------------


def make_whole(rng: random.Random, size: int) -> dict[str, Any]:
    most = min(2 + size // 4, MOST)
    return {"ranks": rng.randint(2, most), "length": rng.randint(0, 2 + size), "transposed": rng.randint(0, 1)}


def show_whole(workload: dict[str, Any]) -> str:
    how = ", two columns, transposed" if workload.get("transposed") else ""
    return f"{workload['ranks']} ranks, {workload['length']} elements{how}"


def run_whole(student: Student, workload: dict[str, Any]) -> None:
    length = workload["length"]
    if workload["transposed"]:
        length += length % 2
    all_reduce(student, workload["ranks"], length, bool(workload["transposed"]))


def all_reduce(student: Student, n: int, length: int, transposed: bool = False) -> None:
    """One all-reduce, judged. Raises `Broken`."""
    promise = "all_reduce gives every rank the sum over all ranks."
    for parts in (votes(n, length), randoms(n, length)):

        def work(comm: Any, parts: Sequence[Tensor] = parts) -> Tensor:
            x = parts[comm.rank].clone()
            got = comm.all_reduce(x.view(2, -1).t() if transposed else x)
            if not isinstance(got, Tensor):
                raise Broken("raises", promise, f"all_reduce returned {got!r:.40}, which is no tensor.")
            if got.shape != ((length // 2, 2) if transposed else (length,)):
                raise Broken("shape", promise, f"The result has the shape {list(got.shape)}.")
            return (got.t() if transposed else got).reshape(-1).clone()

        got, _ = on_wire(student, n, work)
        want = torch.stack(list(parts)).sum(0)
        for rank, x in enumerate(got):
            wrong = (x != want).nonzero().flatten().tolist()
            if not wrong:
                continue
            first = wrong[0]
            if parts[0].dtype != torch.int64:
                seen = f"On rank {rank} of {n}, element {first} is made of all parts, but of other elements'."
                raise Broken("order", promise, seen)
            laid = torch.arange(length).view(2, -1).t().flatten() if transposed else torch.arange(length)
            behind = sorted(wrong) == sorted(laid[length - len(wrong) :].tolist())  # in the order of its rows
            if behind and all(int(x[i]) == 8**rank for i in wrong):
                of = f"{length} elements, {n} ranks"
                raise Broken("tail", promise, f"The last {len(wrong)} elements were not added up ({of}).")
            raise misadded(f"element {first} on rank {rank}", int(x[first]), n, promise)


def run_bits(student: Student, workload: dict[str, Any]) -> None:
    """Sums of numbers whose order shows in the last bit."""
    generator = torch.Generator().manual_seed(workload["seed"])
    n, length = workload["ranks"], workload["length"]
    parts = torch.randn(max(n, 1), length, generator=generator)
    got, _ = on_wire(student, n, lambda comm: comm.all_reduce(parts[comm.rank].clone()).clone())
    for rank, x in enumerate(got):
        differ = (x != got[0]).nonzero().flatten().tolist()
        if differ:
            a, b = float(got[0][differ[0]]), float(x[differ[0]])
            seen = f"Element {differ[0]} is {a!r} on rank 0 and {b!r} on rank {rank} of {n}."
            raise Broken("bits", "All ranks hold the same bits.", seen)


def make_bits(rng: random.Random, size: int) -> dict[str, Any]:
    return {"ranks": rng.randint(2, MOST), "length": 4 + size, "seed": rng.randint(0, 9999)}


def count_bytes(student: Student) -> str:
    """What each rank sends, for n = 2, 3, 5: 2(n - 1)/n of the message, and alike."""
    said = []
    for n in (2, 3, 5):
        length = 240 * n

        def work(comm: Any, length: int = length) -> Any:
            return comm.all_reduce(torch.ones(length))

        _, wire = on_wire(student, n, work)
        sent = [sum(nbytes for _, nbytes in messages) for messages in wire.sent]
        least = 2 * (n - 1) * length // n * 4
        promise = f"With {n} ranks each sends 2(n - 1)/n of the message: {least} of its {length * 4} bytes."
        if sum(sent) < n * least:
            raise Broken("group", promise, f"They sent {sent} bytes: the sum went another way than send and receive.")
        if max(sent) != min(sent):
            raise Broken("centre", promise, f"They sent {sent} bytes: some more than others.")
        if max(sent) > least:
            raise Broken("bytes", promise, f"Each sent {sent[0]} bytes.")
        said.append(f"{sent[0] / length / 4:.3g}")
    return f"each of 2, 3, 5 ranks sends {', '.join(said)} messages' worth"


def link(student: Student, rank: int, size: int, address: str) -> Any:
    """One rank's, over gloo."""
    return student.make(rank=rank, size=size, address=address, device=CPU)


def waits(said: str) -> str | None:
    return "deadlock" if "wait for each other" in said else None


def engine(student: Student) -> str:
    """The model cut over two ranks that the student's ring links computes what one rank computes."""
    from minisgl.models.resolve import resolve_model
    from minisgl.plugin_manager.manager import PluginManager
    from minisgl.testing.paged import PagedModel

    manager, ids = PluginManager.load(), torch.arange(100, 124)
    path, ranks = resolve_model("tutor"), 2

    def drive(comm: Any = None) -> Tensor:
        model = PagedModel(path, comm=comm, max_len=32, slots=1, manager=manager)
        rows = [model.run([(0, 0, ids[:20])]), *(model.run([(0, i, ids[i : i + 1])]) for i in range(20, 24))]
        return torch.cat([row for (row,) in rows])

    want = drive()
    for rank, got in enumerate(run_ranks(ranks, drive, make=partial(link, student), limit=8.0)):
        off = float((got - want).abs().max())
        if not off < 1e-3:
            seen = f"Logits of tutor on rank {rank} of {ranks} are off by {off:.3g}."
            raise Broken("promise", "Over any number of ranks, a model computes the same.", seen)
    return f"tutor over {ranks} ranks computes what it does on one"


GATES = (
    Gate("swap", "neighbours exchange, and nobody waits for ever",
         search(make_chunks, run_swap, show=show_chunks), part="ring.swap"),
    Gate("scatter", "each rank adds up its own chunk",
         search(make_chunks, run_reduce_scatter, show=show_chunks), part="ring.reduce_scatter"),
    Gate("circulate", "each finished chunk comes to every rank",
         search(make_chunks, run_circulate, show=show_chunks), part="ring.circulate"),
    Gate("sum", "any length on any number of ranks is added up",
         search(make_whole, run_whole, show=show_whole), part="ring.all_reduce"),
    Gate("bits", "all ranks hold the same bits", search(make_bits, run_bits, tries=40, show=show_whole)),
    Gate("bytes", "no rank sends more than it must", count_bytes),
    # Ranks meet 16 times, each for 5 s or more where a name server does not answer. Deadlocks are told in 10.
    conformance(lambda: CommunicatorConformance, link, causes=waits, limit=120.0),
    Gate("engine", "tutor over two ranks is tutor", engine, limit=30.0),
    facts(["all_reduce"]),
)  # fmt: skip

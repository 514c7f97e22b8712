"""Gates of lab `ring`: ranks over a simulated network that records each message, over gloo, and in the server."""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from minisgl.chapters.lab.grader.conformance import conformance
from minisgl.chapters.lab.grader.gate import Broken, Gate, Invalid, Stretch, Student
from minisgl.chapters.lab.grader.search import search
from minisgl.chapters.lab.grader.server_gate import facts
from minisgl.chapters.lab.grader.timed_wire import BUSY_US, BYTES_PER_US, DELAY_US, RANKS, all_reduce_us
from minisgl.chapters.lab.grader.tutor_runs import linked_logits
from minisgl.plugins.communicator.group import GroupCommunicator
from minisgl.plugins.kernels.ops.launch import recording
from minisgl.testing.communicator import CommunicatorConformance
from minisgl.testing.wire import RULES, Wire, WireViolation

CPU = torch.device("cpu")
SERVER = ["tp=2"]
MOST = 5
"""The largest number of ranks that most workloads have."""

Work = Callable[[Any], Any]


def on_wire(student: Student, ranks: int, work: Work) -> tuple[list[Any], Wire]:
    """Run ``work(communicator)`` on each rank with the student's communicator.

    Return the results and the simulated network, which has the messages. Raise `Broken` for a wrong exchange.
    """
    if not 2 <= ranks <= 2 * MOST:
        raise Invalid
    wire = Wire(ranks)
    try:
        results = wire.run(lambda rank, size: student.make(rank=rank, size=size, address="", device=CPU), work)
    except WireViolation as error:
        cause = {"changed": "early", "unwaited": "early", "left": "sizes"}.get(error.rule, error.rule)
        if error.rule == "sizes" and len({*re.findall(r"elements of (\w+)", error.text)}) > 1:
            cause = "dtypes"
        raise Broken(cause, RULES[error.rule], error.text) from error
    return results, wire


def has(student: Student, method: str) -> bool:
    """Return whether the student's communicator has this method of the skeleton."""
    return hasattr(student.make(rank=0, size=1, address="", device=CPU), method)


def votes(ranks: int, length: int) -> list[Tensor]:
    """Return a tensor for each rank: digit r, in base 8, of their sum says how often rank r's part is in the sum."""
    return [torch.full((length,), 8**rank, dtype=torch.int64) for rank in range(ranks)]


def counted(x: int, ranks: int) -> list[int]:
    """Return how often each rank's part is in ``x``, one element of a sum of `votes`."""
    return [x // 8**rank % 8 for rank in range(ranks)]


def randoms(ranks: int, length: int) -> list[Tensor]:
    """Return a random tensor for each rank. Its elements are integers, so that sums do not depend on their order."""
    generator = torch.Generator().manual_seed(length)
    return [torch.randint(-99, 100, (length,), generator=generator).float() for _ in range(ranks)]


def large(ranks: int, length: int) -> list[Tensor]:
    """Return a tensor of large odd integers for each rank, which no floating-point type of 32 bits holds."""
    return [torch.arange(length, dtype=torch.int64) * 2 + (1 << 40) + 2 * rank + 1 for rank in range(ranks)]


# ---- the parts -------------------------------------------------------------------------------------------


def make_chunks(rng: random.Random, size: int) -> dict[str, Any]:
    """Return a random workload: the length of each rank's chunk. Size 7: more ranks than 8."""
    most = min(2 + size // 4, MOST)
    if size == 7:
        return {"chunks": [rng.randint(0, 3) for _ in range(9)]}
    return {"chunks": [rng.randint(0, 1 + size // 3) for _ in range(rng.randint(2, most))]}


def show_chunks(workload: dict[str, Any]) -> str:
    """Describe the workload in one line."""
    return f"{len(workload['chunks'])} ranks, chunks of {workload['chunks']} elements"


def run_swap(student: Student, workload: dict[str, Any]) -> None:
    """Grade `swap` alone. A communicator without this method is graded as a whole."""
    check_names(student)
    lengths = workload["chunks"]
    if not has(student, "swap"):
        return all_reduce(student, len(lengths), sum(lengths))
    try:
        swap(student, lengths)
    except Broken as fault:
        if 0 in lengths:
            swap(student, [length or 1 for length in lengths])  # raises the finding that has nothing to do with 0
            promise = "A sender may skip an empty chunk. Then its receiver skips it too, and each does all else."
            raise Broken("empty", promise, fault.seen) from fault
        raise
    if all(lengths):  # with empty chunks, a missing wait is not found above
        check_errors(student)


class _Failing:
    """A transfer whose `wait` raises an error if it ``fails``, and returns at once if not."""

    def __init__(self, fails: bool):
        self.fails = fails

    def wait(self, *limit: Any) -> bool:
        if self.fails:
            raise RuntimeError("The other rank did not answer in time.")
        return True

    is_completed = wait


def check_errors(student: Student) -> None:
    """Check that `swap` raises the error of a transfer that fails, such as a timeout."""
    with patch.object(GroupCommunicator, "_connect", lambda *_: None):
        comm = student.make(rank=0, size=2, address="", device=CPU)
    for fails in ("receive", "send"):
        comm.send, comm.receive = (lambda *_, bad=fails == name: _Failing(bad) for name in ("send", "receive"))
        try:
            comm.swap(torch.ones(3), torch.ones(3))
        except RuntimeError as error:
            if not isinstance(error, NotImplementedError):
                continue
            raise
        seen = f"`wait()` of a {fails} raised RuntimeError because of a timeout, but `swap` returned as usual."
        promise = "A transfer that fails ends the all-reduce with its error."
        raise Broken("swallowed", promise, seen, show="2 ranks, a transfer that fails")


SKELETON = ("__init__", "swap", "reduce_scatter", "circulate", "all_reduce")


def check_names(student: Student) -> None:
    """Check that no helper method has the name of a method of the base class that others call in another way."""
    kind = type(student.make(rank=0, size=1, address="", device=CPU))
    for name, method in vars(kind).items():
        inherited = getattr(GroupCommunicator, name, None)
        if name in SKELETON or not callable(inherited) or not callable(method) or name.startswith("__"):
            continue
        mine, base = (list(inspect.signature(each).parameters) for each in (method, inherited))
        if mine != base:
            promise = "Methods of the base class that the file overrides have the arguments of the base class."
            seen = f"`{name}` has the arguments {', '.join(mine)}; in the base class: {', '.join(base)}."
            raise Broken("name", promise, seen, show=f"the method `{name}`")


def swap(student: Student, lengths: Sequence[int]) -> None:
    """Grade `swap` on chunks of these lengths."""
    n = len(lengths)
    partners: list[tuple[str, int, int]] = []  # "sends to" or "receives from", the rank, the other rank
    seconds: dict[int, Tensor] = {}  # what each rank received in a second exchange
    events: list[list[str]] = [[] for _ in range(n)]  # each rank's sends, receives and waits, in order

    def work(comm: Any) -> Tensor:
        send, receive = comm.send, comm.receive

        def noted_send(x: Tensor, to: int) -> Any:
            partners.append(("sends to", comm.rank, to))
            events[comm.rank].append("send")
            return noted_wait(send(x, to))

        def noted_receive(x: Tensor, source: int) -> Any:
            partners.append(("receives from", comm.rank, source))
            events[comm.rank].append("receive")
            return noted_wait(receive(x, source))

        def noted_wait(transfer: Any) -> Any:
            wait, rank = transfer.wait, comm.rank

            def noted(*limit: Any) -> Any:
                __tracebackhide__ = True  # a deadlock names the student's line
                events[rank].append("wait")
                return wait(*limit)

            transfer.wait = noted
            return transfer

        comm.send, comm.receive = noted_send, noted_receive
        incoming = torch.full((lengths[comm.rank - 1],), -1.0)
        outgoing = torch.full((lengths[comm.rank],), float(comm.rank))
        comm.swap(outgoing, incoming)
        if not bool((outgoing == comm.rank).all()):
            seen = f"After `swap`, `outgoing` of rank {comm.rank} of {n} holds {outgoing.tolist()[:6]}."
            raise Broken("changed", "`swap` changes only `incoming`.", seen)
        comm.send, comm.receive = send, receive  # another exchange, of other lengths and of another dtype
        second = torch.full((lengths[-comm.rank],), -1)
        comm.swap(torch.full((lengths[-comm.rank - 1],), comm.rank), second)
        seconds[comm.rank] = second
        return incoming

    promise = "Each rank sends to its right neighbour and receives from its left neighbour."
    try:
        got, _ = on_wire(student, n, work)
    except Broken as fault:
        found = wrong_neighbour(partners, n)
        raise Broken("neighbours", promise, f"{found} {fault.seen}") if found else fault from fault
    for rank, incoming in enumerate(got):
        left = (rank - 1) % n
        if not bool((incoming == left).all()):
            seen = (
                f"After `swap`, rank {rank} of {n} has received {incoming.tolist()[:6]}; its left neighbour, rank "
                f"{left}, has sent elements with the value {left}."
            )
            raise Broken("neighbours" if wrong_neighbour(partners, n) else "order", promise, seen)
    for rank, second in seconds.items():
        if not bool((second == (rank - 1) % n).all()):
            seen = f"A second `swap`, of integers, has brought {second.tolist()[:6]} to rank {rank} of {n}."
            raise Broken("kept", "Each `swap` exchanges the tensors that it was given.", seen)
    for rank, each in enumerate(events):
        first = each[: each.index("wait")] if "wait" in each else each
        if {*first, "wait"} != {*each, "wait"}:
            promise = "A rank sends to its right neighbour and, at the same time, receives from its left neighbour."
            raise Broken("turns", promise, f"Rank {rank} of {n} waited for one transfer before it started the other.")


def wrong_neighbour(partners: Sequence[tuple[str, int, int]], n: int) -> str:
    """Return a sentence about the lowest rank that exchanges with a wrong neighbour, or "" if there is none."""
    for action, rank, other in sorted(partners, key=lambda partner: partner[1]):
        side, right = ("right", (rank + 1) % n) if action == "sends to" else ("left", (rank - 1) % n)
        if n > 2 and other != right:
            return f"Rank {rank} of {n} {action} rank {other}; its {side} neighbour is rank {right}."
    return ""


def run_reduce_scatter(student: Student, workload: dict[str, Any]) -> None:
    """Grade `reduce_scatter` alone. A communicator without this method is graded as a whole."""
    lengths = workload["chunks"]
    n = len(lengths)
    if not has(student, "reduce_scatter"):
        return all_reduce(student, n, sum(lengths))
    kept: list[bool] = []
    for parts in (votes(n, sum(lengths)), randoms(n, sum(lengths))):

        def work(comm: Any, parts: Sequence[Tensor] = parts) -> list[Tensor]:
            chunks = parts[comm.rank].clone().split(lengths)
            given = (
                chunks if parts[0].dtype == torch.float32 and len(set(lengths)) > 1 and all(lengths) else list(chunks)
            )
            try:
                comm.reduce_scatter(given)
            except TypeError as error:
                if "'tuple' object" not in str(error):
                    raise
                promise = "`reduce_scatter` changes the tensors in `chunks`, and not the sequence."
                raise Broken("sequence", promise, f"`chunks` was a tuple. TypeError: {error}.") from error
            kept.append(same_sequence(given, chunks))
            return list(chunks)

        got, wire = on_wire(student, n, work)
        want = torch.stack(list(parts)).sum(0).split(lengths)
        for rank, chunks in enumerate(got):
            if not torch.equal(chunks[rank], want[rank]):
                raise wrong_chunk(rank, got, want, parts, any(wire.sent))
    if all(lengths):  # with empty chunks, sums that are not in place are not found above
        check_sequences("reduce_scatter", kept)


def same_sequence(given: Sequence[Tensor], chunks: Sequence[Tensor]) -> bool:
    """Return whether ``given`` still has the tensors ``chunks``, in their order."""
    return len(given) == len(chunks) and all(a is b for a, b in zip(given, chunks, strict=True))


def check_sequences(method: str, kept: Sequence[bool]) -> None:
    """Raise `Broken` unless ``kept``, the results of `same_sequence`, are all true."""
    if not all(kept):
        seen = f"After `{method}`, the list `chunks` has other entries than before, or another number of entries."
        raise Broken("sequence", f"`{method}` changes the tensors in `chunks`, and not the sequence.", seen)


def wrong_chunk(
    rank: int, got: Sequence[list[Tensor]], want: Sequence[Tensor], parts: Sequence[Tensor], sent: bool
) -> Broken:
    """Return the finding for a rank whose own chunk is not the sum. ``sent`` says whether any rank sent anything."""
    promise, n = "After `reduce_scatter`, chunk r on rank r is the sum of all ranks' chunks r.", len(want)
    chunks = got[rank]
    if sent and all(torch.equal(chunks[i], parts[r].split([len(w) for w in want])[i]) for r, chunks in enumerate(got)
           for i in range(n)):  # fmt: skip
        seen = f"After `reduce_scatter` on {n} ranks, the tensors of `chunks` hold what they held before."
        return Broken("in-place", "`reduce_scatter` sums the chunks in place.", seen)
    for other in range(n):
        for i in range(n):
            if i != other and len(want[i]) and torch.equal(got[other][i], want[i]):
                seen = f"On rank {other} of {n}, chunk {i} is the complete sum; chunk {other} should be."
                return Broken("order", promise, seen)
    if parts[0].dtype != torch.int64:
        seen = f"Chunk {rank} on rank {rank} of {n} has a part of every rank, but of the wrong elements."
        return Broken("order", promise, seen)
    return wrong_sum(f"chunk {rank} on rank {rank}", int(chunks[rank][0]), n, promise)


def wrong_sum(what: str, value: int, n: int, promise: str) -> Broken:
    """Return the finding for a wrong sum of `votes`: which ranks' parts are missing or added more than once."""
    times = counted(value, n)
    twice = [rank for rank, count in enumerate(times) if count > 1]
    missing = [rank for rank, count in enumerate(times) if count == 0]
    if twice:
        return Broken("twice", promise, f"In {what}, the part of {ranks_named(twice)} was added more than once.")
    return Broken("missing", promise, f"In {what}, the part of {ranks_named(missing)} is missing ({n} ranks).")


def ranks_named(ranks: Sequence[int]) -> str:
    """Name ranks in words."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


def run_circulate(student: Student, workload: dict[str, Any]) -> None:
    """Grade `circulate` alone. A communicator without this method is graded as a whole."""
    lengths = workload["chunks"]
    n = len(lengths)
    if not has(student, "circulate"):
        return all_reduce(student, n, sum(lengths))
    kept: list[bool] = []

    def work(comm: Any) -> list[Tensor]:
        chunks = [torch.full((length,), 8 * i + 8 if i == comm.rank else -1) for i, length in enumerate(lengths)]
        given = chunks[:] if n % 2 else tuple(chunks)
        comm.circulate(given)
        kept.append(same_sequence(given, chunks))
        return chunks

    got, _ = on_wire(student, n, work)
    promise = "After `circulate`, each rank has every rank's finished chunk."
    for rank, chunks in enumerate(got):
        if not bool((chunks[rank] == 8 * rank + 8).all()):
            seen = f"Rank {rank} of {n} received into chunk {rank}, which was finished on this rank. "
            seen += f"The first chunk that it receives should be chunk {(rank - 1) % n}."
            raise Broken("order", promise, seen)
    for rank, chunks in enumerate(got):
        for i, chunk in enumerate(chunks):
            if bool((chunk == 8 * i + 8).all()):
                continue
            found = int(chunk[0])
            others = [c for r, cs in enumerate(got) for c in cs[:r] + cs[r + 1 :]]
            if all(bool((c == -1).all()) for c in others):
                seen = f"After `circulate` on {n} ranks, the tensors of `chunks` hold what they held before."
                raise Broken("in-place", "`circulate` copies the finished chunks into the tensors of `chunks`.", seen)
            if found == 8 * i + 7:
                seen = f"On rank {rank} of {n}, chunk {i} was added to the old contents instead of replacing them."
                raise Broken("added", promise, seen)
            holds = "its old contents" if found < 0 else f"chunk {found // 8 - 1}"
            raise Broken("order", promise, f"On rank {rank} of {n}, the position of chunk {i} contains {holds}.")
    check_sequences("circulate", kept)


# ---- the whole -------------------------------------------------------------------------------------------


def make_whole(rng: random.Random, size: int) -> dict[str, Any]:
    """Return a random workload: the ranks, the number of elements, and whether the tensor is transposed."""
    if size == 3:  # more than any buffer of a fixed size, and one chunk needs one more buffer than the others
        return {"ranks": 3, "length": 3 * 2**17 + 1, "transposed": 0}
    if size == 5:
        return {"ranks": 9, "length": 21, "transposed": 0}
    if size % 4 == 2 and size > 2:
        kinds = rng.sample(range(len(KINDS)), 9)
        kinds += rng.choices(kinds, k=3)  # some kinds occur again
        return {"ranks": 2 + size // 4 % 3, "length": 0, "transposed": 0, "kinds": kinds}
    most = min(2 + size // 4, MOST)
    return {"ranks": rng.randint(2, most), "length": rng.randint(0, 2 + size), "transposed": rng.randint(0, 1)}


def show_whole(workload: dict[str, Any]) -> str:
    """Describe the workload in one line."""
    if "kinds" in workload:
        kinds = ", ".join(map(str, kinds_of(workload)))
        return f"{workload['ranks']} ranks, one all-reduce after another: {kinds}"
    length, layout = workload["length"], ""
    if workload.get("transposed"):
        length, layout = length + length % 2, ", a transposed tensor with two columns"
    return f"{workload['ranks']} ranks, {length} elements{layout}"


def run_whole(student: Student, workload: dict[str, Any]) -> None:
    """Grade one all-reduce of the workload."""
    if "kinds" in workload:
        return run_kinds(student, workload)
    recorded = check_one_rank(student)
    length = workload["length"]
    if workload["transposed"]:
        length += length % 2
    all_reduce(student, workload["ranks"], length, bool(workload["transposed"]))
    check_decorator(recorded)


class Kind(NamedTuple):
    """A tensor to sum. ``layout``: "columns" are the first columns of a wider tensor; "reversed" is permuted."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str = ""

    def __str__(self) -> str:
        layouts = {"columns": " (the first columns of a wider tensor)", "reversed": " (its dimensions are permuted)"}
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}{layouts.get(self.layout, '')}"


KINDS: tuple[Kind, ...] = (
    Kind((8,), torch.float32), Kind((8,), torch.int64), Kind((8,), torch.float64), Kind((), torch.float32),
    Kind((3,), torch.float32), Kind((2, 3, 4), torch.bfloat16), Kind((5,), torch.int32), Kind((0, 3), torch.float32),
    Kind((4, 2), torch.float32, "columns"), Kind((6,), torch.float16), Kind((2, 4), torch.float64),
    Kind((100,), torch.float32), Kind((7,), torch.int8), Kind((5,), torch.uint8), Kind((9,), torch.int16),
    Kind((2, 3, 4), torch.float32, "reversed"), Kind((3, 1, 2), torch.int64, "reversed"),
    Kind((3, 2), torch.int32, "columns"),
)  # fmt: skip
"""Shapes, dtypes and layouts of the tensors that one communicator sums, one after another."""


def kinds_of(workload: dict[str, Any]) -> list[Kind]:
    """Return the tensors of a workload. Raise `Invalid` if there are none."""
    if not workload["kinds"] or not all(0 <= kind < len(KINDS) for kind in workload["kinds"]):
        raise Invalid
    return [KINDS[kind] for kind in workload["kinds"]]


RETURNED = "`all_reduce` returns the tensor that has the sums."


def run_kinds(student: Student, workload: dict[str, Any]) -> None:
    """Grade several all-reduces of one communicator, of other shapes and dtypes. The results are read at the end.

    The numbers are exact in the dtype of the tensor, and in no smaller one.
    """
    n, kinds = workload["ranks"], kinds_of(workload)
    large = {torch.float64: 2**40 + 1, torch.int64: 2**60 + 1, torch.int32: 2**26 + 1, torch.float32: 2**12 + 1,
             torch.int16: 2**14, torch.int8: 99, torch.uint8: 99}  # fmt: skip

    def part(i: int, rank: int) -> Tensor:
        shape, dtype, layout = kinds[i]
        numbers = torch.arange(torch.Size(shape).numel()) % 8 + 3 * rank + i
        x = (numbers + large.get(dtype, 0)).to(dtype).view(shape)
        if dtype.is_floating_point and len(numbers) > 4 and rank == 0:
            x.view(-1)[3] = torch.inf
        if layout == "reversed":
            return x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))
        return torch.cat((x, x), 1)[:, : shape[1]] if layout == "columns" else x

    def sums(comm: Any, which: Sequence[int]) -> list[Tensor]:
        results = []
        for i in which:
            x = part(i, comm.rank)
            results.append(comm.all_reduce(x))
            if kinds[i].layout == "columns":
                base = x.as_strided((len(x), x.stride(0)), (x.stride(0), 1))
                if not torch.equal(base[:, x.shape[1] :], part(i, comm.rank)):
                    promise = "`all_reduce` may overwrite the elements of x, and no other elements in its memory."
                    seen = f"x was {kinds[i]}. After `all_reduce`, the other columns have other numbers than before."
                    raise Broken("outside", promise, seen)
        return results

    def run(which: Sequence[int]) -> list[list[Tensor]]:
        return on_wire(student, n, lambda comm: sums(comm, which))[0]

    for rank, results in enumerate(run(range(len(kinds)))):
        for i, got in enumerate(results):
            shape, dtype, _ = kinds[i]
            want = torch.stack([part(i, r) for r in range(n)]).sum(0, dtype=dtype)
            what = f"of a tensor {kinds[i]}"
            if not isinstance(got, Tensor) or got.dtype != dtype:
                seen = f"The sum {what} has the dtype {getattr(got, 'dtype', None)}."
                raise Broken("digits", "The result has the dtype of the input.", seen)
            if tuple(got.shape) != shape:
                raise Broken("shape", "The result has the shape of the input.", f"The sum {what} is {list(got.shape)}.")
            if torch.equal(got, want):
                continue
            seen = f"On rank {rank} of {n}, the sum {what} is {got.flatten()[:4].tolist()}; "
            seen += f"it should be {want.flatten()[:4].tolist()}."
            if torch.equal(run([i])[rank][0], want):
                text = f"{seen} It is right if no other tensor was summed before."
                raise Broken("kept", "The result of an all-reduce does not depend on others.", text)
            if torch.equal(got, part(i, rank)):
                raise Broken("returned", RETURNED, f"{seen} This is the tensor that `all_reduce` was given.")
            if dtype == torch.float32:
                raise Broken("missing", "The sum has the part of every rank.", seen)
            raise Broken("digits", "The sum is computed in the dtype of the input.", seen)


def check_one_rank(student: Student) -> bool:
    """Check that with one rank the sum is the tensor itself. Return whether a recorder sees the call."""
    recorded: list[Any] = []

    def record(function: Any, args: Any, kwargs: Any) -> Any:
        recorded.append(function)
        return function(*args, **kwargs)

    for x in (torch.tensor([2**40 + 1, 3]), torch.tensor(2.5), torch.arange(6.0).view(2, 3).t(), torch.ones(0, 3)):
        before = x.clone()
        with recording(record):
            got = student.make(rank=0, size=1, address="", device=CPU).all_reduce(x)
        if got is x and torch.equal(x, before):
            continue
        if isinstance(got, Tensor) and torch.equal(got, before):
            same = (got.data_ptr(), got.shape, got.stride()) == (x.data_ptr(), x.shape, x.stride())
            seen = f"With one rank, the sum of a tensor {list(x.shape)} is a copy of it."
            if same and got.dtype == x.dtype:
                continue  # another Python object, for the same memory
        else:
            seen = f"With one rank, the sum of {before.tolist()} is {got!r:.60}."
        raise Broken("alone", "With one rank, `all_reduce` returns its argument.", seen, show="1 rank")
    return bool(recorded)


def check_decorator(recorded: bool) -> None:
    """Raise `Broken` if a recorder did not see the call of `all_reduce`."""
    if not recorded:
        seen = "A recorder did not see the call of `all_reduce`."
        promise = "A simulated graph records an all-reduce as one operation."
        raise Broken("decorator", promise, seen, show="1 rank, 2 elements")


def all_reduce(student: Student, n: int, length: int, transposed: bool = False) -> None:
    """Run all-reduces of ``length`` elements on ``n`` ranks. Raise `Broken` for a wrong result."""
    promise = "`all_reduce` returns the sum over all ranks, on each rank."
    rounds = ((votes(n, length), 0), (randoms(n, length), 1), (large(n, length), 0))
    for parts, before in rounds[: 1 if length > 10_000 else 3]:

        def work(comm: Any, parts: Sequence[Tensor] = parts, before: int = before) -> Tensor:
            x = parts[comm.rank].clone()
            if before:  # an earlier step, with a tensor of the same size: the sum must not depend on it
                earlier = comm.all_reduce(torch.full_like(x, 3.0))
            if transposed:
                given = x.view(2, -1).t()
            else:  # in some all-reduces, the elements of x have others between them
                given = torch.stack((x, x), 1)[:, 0] if before else x
            got = comm.all_reduce(given)
            if before and not bool((earlier == 3.0 * n).all()):
                seen = "A later all-reduce of a tensor of the same size has changed the result of an earlier one."
                raise Broken("kept", "The result of an all-reduce stays as it is.", seen)
            if not isinstance(got, Tensor):
                raise Broken("raises", promise, f"`all_reduce` returned {got!r:.40}, which is not a tensor.")
            shape = (length // 2, 2) if transposed else (length,)
            if got.dtype != x.dtype:
                seen = f"The result has the dtype {got.dtype}, the input {x.dtype}."
                raise Broken("digits", "The result has the dtype of the input.", seen)
            if got.shape != shape:
                seen = f"The result has the shape {list(got.shape)}, the input {list(shape)}."
                raise Broken("shape", promise, seen)
            return (got.t() if transposed else got).reshape(-1).clone()

        got, _ = on_wire(student, n, work)
        want = torch.stack(list(parts)).sum(0)
        check_returned(got, want, parts, transposed)
        for rank, x in enumerate(got):
            wrong = (x != want).nonzero().flatten().tolist()
            if not wrong:
                continue
            first = wrong[0]
            if before:
                seen = (
                    f"On rank {rank} of {n}, element {first} is {float(x[first]):g}; the sum is {float(want[first]):g}."
                )
                if length > 1 and bool((x == x[0]).all()) and not bool((want == want[0]).all()):
                    text = f"{seen} An earlier all-reduce of this size had {3.0:g} in all elements, of all ranks."
                    raise Broken("kept", "Each all-reduce sums its own tensor.", text)
                raise Broken("order", promise, f"{seen} It has a part of every rank, but of the wrong elements.")
            if parts[0][0] >= 1 << 40:
                seen = f"On rank {rank} of {n}, element {first} is {int(x[first])}; the sum is {int(want[first])}."
                raise Broken("digits", "Integers of 64 bits are summed exactly.", seen)
            row_major = torch.arange(length).view(2, -1).t().flatten() if transposed else torch.arange(length)
            at_end = sorted(wrong) == sorted(row_major[length - len(wrong) :].tolist())
            if at_end and len(wrong) == length % n and all(int(x[i]) == 8**rank for i in wrong):
                sizes = f"{length} elements, {n} ranks"
                raise Broken("tail", promise, f"The last {len(wrong)} elements were not summed ({sizes}).")
            raise wrong_sum(f"element {first} on rank {rank}", int(x[first]), n, promise)


def check_returned(got: Sequence[Tensor], want: Tensor, parts: Sequence[Tensor], transposed: bool) -> None:
    """Raise `Broken` if the ranks have their inputs, or if only the chunk that a rank has summed itself is right."""
    n, length = len(got), len(want)
    if torch.equal(got[0], want) or n < 2 or length < 2:
        return
    if all(torch.equal(x, part) for x, part in zip(got, parts, strict=True)):
        raise Broken("returned", RETURNED, f"On each of {n} ranks, `all_reduce` returned its input unchanged.")
    order = torch.arange(length).view(2, -1).t().flatten() if transposed else torch.arange(length)
    own = [torch.isin(torch.arange(length), order.tensor_split(n)[rank]) for rank in range(n)]
    if all(torch.equal(x == want, mine) for x, mine in zip(got, own, strict=True)):
        seen = f"On each of {n} ranks, only the chunk with the rank's number is complete."
        raise Broken("circulated", "`all_reduce` returns the sum over all ranks, on each rank.", seen)


FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def run_bits(student: Student, workload: dict[str, Any]) -> None:
    """Compare the ranks' results bit by bit, for numbers whose sum depends on the order of the additions."""
    generator = torch.Generator().manual_seed(workload["seed"])
    n, length = workload["ranks"], workload["length"]
    parts = torch.randn(max(n, 1), length, generator=generator)
    parts *= 2.0 ** torch.randint(-9, 10, parts.shape, generator=generator)  # of different sizes: each order rounds
    parts = parts.to(FLOATS[workload["dtype"] % len(FLOATS)])
    got, _ = on_wire(student, n, lambda comm: comm.all_reduce(parts[comm.rank].clone()).clone())
    for rank, x in enumerate(got):
        differ = (x != got[0]).nonzero().flatten().tolist()
        if differ:
            a, b = float(got[0][differ[0]]), float(x[differ[0]])
            seen = f"Element {differ[0]} is {a!r} on rank 0 and {b!r} on rank {rank} of {n}."
            raise Broken("bits", "The result has the same bits on all ranks.", seen)


def make_bits(rng: random.Random, size: int) -> dict[str, Any]:
    """Return a random workload for `run_bits`. Size 2: a long tensor; sizes 3 to 6: fewer elements than ranks."""
    length = {2: 3 * 2**17 + 1, 3: 1, 4: 3, 5: 2, 6: 1}.get(size, 4 + size)
    ranks = {2: 3, 3: 3, 4: MOST, 5: MOST, 6: 4}.get(size, rng.randint(2, MOST))
    dtype = 0 if size < 7 else size % len(FLOATS)
    return {"ranks": ranks, "length": length, "seed": rng.randint(0, 9999), "dtype": dtype}


def count_bytes(student: Student) -> str:
    """Count the bytes that each of n = 2, 3, 5 ranks sends: 2(n - 1)/n of the tensor, the same on each rank.

    If n does not divide the number of elements, the largest chunk may have one element more. Tensors have one
    dimension or two, as in a decode step with one row, and dtypes of several sizes.
    """
    shares = []
    sizes = (240,), (1, 64), (3, 5), (7,), (30_001,)
    dtypes = torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.float32
    for n in (2, 3, 5):
        for shape, dtype in (*zip(sizes, dtypes, strict=True), ((240 * n,), torch.float32), ((3, 5), torch.float16)):
            sent = sent_bytes(student, n, shape, dtype)
            elements, each = torch.Size(shape).numel(), dtype.itemsize
            least = 2 * (n - 1) * elements // n * each
            # Two rings may be padded, and a long tensor may be summed piece by piece.
            most = 2 * (n - 1) * (elements // n + 2 + elements // 1000) * each
            name = str(dtype).removeprefix("torch.")
            promise = f"Each of {n} ranks sends 2(n - 1)/n of the tensor: about {least} of its {elements * each} bytes."
            what = f"For a tensor of the shape {list(shape)} and the dtype {name}, the ranks"
            if sum(sent) < 2 * (n - 1) * elements * each:
                seen = f"{what} sent {sent} bytes with `self.send`: the sum used another way of communication."
                raise Broken("group", promise, seen)
            if max(sent) > most and max(sent) - min(sent) > most - least:
                raise Broken("centre", promise, f"{what} sent {sent} bytes: some ranks more than others.")
            if max(sent) > most:
                raise Broken("bytes", promise, f"{what} sent {sent} bytes, where {most} are enough for each.")
        shares.append(f"{2 * (n - 1) / n:.3g}")
    return f"each of 2, 3, 5 ranks sends {', '.join(shares)} times the tensor's bytes"


def sent_bytes(student: Student, n: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[int]:
    """Return the number of bytes that each rank sends in one all-reduce.

    Raise `Broken` if `all_reduce` calls `reduce_scatter` with chunks whose lengths differ by more than one element.
    """
    calls: list[list[int]] = []

    def work(comm: Any) -> Tensor:
        original = getattr(comm, "reduce_scatter", None)

        def noted(chunks: Any, *more: Any, **options: Any) -> Any:
            calls.append([len(chunk) for chunk in chunks])
            return original(chunks, *more, **options)  # type: ignore[misc]

        if original is not None:
            comm.reduce_scatter = noted
        total: Tensor = comm.all_reduce(torch.ones(shape, dtype=dtype))
        return total

    _, wire = on_wire(student, n, work)
    for lengths in calls:
        if len(lengths) == n and max(lengths) - min(lengths) > 1:
            seen = f"For a tensor of the shape {list(shape)} on {n} ranks, the chunks have {lengths} elements."
            raise Broken("uneven", "The lengths of two chunks differ by at most one element.", seen)
    return [sum(nbytes for _, nbytes in messages) for messages in wire.sent]


def link(student: Student, rank: int, size: int, address: str) -> Any:
    """Return the student's communicator of one rank, over gloo."""
    return student.make(rank=rank, size=size, address=address, device=CPU)


def cause_of(message: str) -> str | None:
    """Return the lab's cause for a message of the conformance kit."""
    return "deadlock" if "wait for each other" in message else None


def engine(student: Student) -> str:
    """Compare the logits of `tutor` over two ranks, linked by the student's communicator, with those of one rank."""
    ranks, want = 2, linked_logits(1)[0]
    answers = student.run(linked_logits, ranks, student.lab.lab, str(student.path))
    if len(answers) != ranks:
        raise Broken("transcript", "Each rank computes logits.", f"{len(answers)} ranks answered.")
    for rank, got in enumerate(answers):
        off = float(np.abs(got - want).max())
        if not off < 1e-3:
            seen = f"The logits of `tutor` on rank {rank} of {ranks} are off by {off:.3g}."
            raise Broken("promise", "A model computes the same logits over any number of ranks.", seen)
    return f"tutor computes the same logits over {ranks} ranks as on one"


GATES = (
    Gate("swap", "neighbours exchange tensors without a deadlock",
         search(make_chunks, run_swap, show=show_chunks), part="ring.swap"),
    Gate("scatter", "each rank ends with the complete sum of its own chunk",
         search(make_chunks, run_reduce_scatter, show=show_chunks), part="ring.reduce_scatter"),
    Gate("circulate", "each finished chunk reaches every rank",
         search(make_chunks, run_circulate, show=show_chunks), part="ring.circulate"),
    Gate("sum", "tensors of any length are summed over any number of ranks",
         search(make_whole, run_whole, show=show_whole), part="ring.all_reduce"),
    Gate("bits", "the result has the same bits on all ranks",
         search(make_bits, run_bits, tries=40, show=show_whole)),
    Gate("bytes", "no rank sends more bytes than necessary", count_bytes),
    # The kit links ranks 16 times; each link takes 5 s or more if no name server answers. Its deadlock limit is 10 s.
    conformance(lambda: CommunicatorConformance, link, causes=cause_of, limit=120.0),
    Gate("engine", "tutor computes the same logits with one rank and with two", engine, limit=30.0, transcript=True),
    facts(["all_reduce"]),
)  # fmt: skip


MOST_US = 20


def measure_stretch(student: Student) -> tuple[str, bool]:
    """Calculate the time of the student's all-reduce of a small tensor over many ranks."""
    us = all_reduce_us(student)
    return f"{us:.1f} µs", us <= MOST_US


STRETCH = Stretch(
    f"If each message takes {DELAY_US:g} µs to arrive, keeps each of its two ranks busy for {BUSY_US:g} µs, and is "
    f"sent at {BYTES_PER_US // 1000} GB/s, the ring needs 14 · 5.52 = 77.3 µs to sum 4 KiB over {RANKS} ranks. "
    f"Need at most {MOST_US} µs, and send as few bytes as the ring.",
    measure_stretch,
)

"""Gates of lab `fuse`: two kernels under Triton's interpreter, each compared with its definition in float64.

Every load and store of the interpreter is recorded: what is read, how often, and whether it belongs to a tensor. Bytes
are counted, and never time.
"""

from __future__ import annotations

import contextlib
import importlib.util
import random
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from minisgl.chapters.lab.grader.gate import Broken, Gate, Invalid, Missing, Stretch, Student, amount
from minisgl.chapters.lab.grader.kernel_accesses import Accesses
from minisgl.chapters.lab.grader.search import search
from minisgl.chapters.lab.grader.server_gate import facts
from minisgl.layers.attention import RMSNormFused
from minisgl.models.resolve import resolve_model
from minisgl.plugin_manager.manager import PluginManager
from minisgl.testing.paged import PagedModel

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float16)
SCALES = (1.0, 1e-3, 300.0, 0.0)
"""Sizes of the numbers of x: with 1e-3, eps counts; the square of 300 is no float16."""
TILE = 16


def launcher_of(student: Student) -> Any:
    """Return the student's `Launcher`, whose kernels are interpreted."""
    if (
        importlib.util.find_spec("triton") is None
    ):  # it is imported by the student's file, which chooses the interpreter
        raise Missing("this lab needs Triton, which exists for Linux: pip install triton")
    schema = student.plugin_manager.schema(student.lab.hook or "", student.lab.name)
    module = sys.modules[schema.__module__]
    if not hasattr(module, "Launcher"):
        raise Broken("lacks-name", "The file has the classes of the skeleton.", "The file has no `Launcher`.")
    return module.Launcher(CPU)


def make_rows(rng: random.Random, size: int) -> dict[str, Any]:
    """Return the sizes of a launch. The first ones have one small tile each."""
    dims = [4, 3, 5, 8, 1, 12] if size <= 6 else [rng.choice([1, 2, 3, 7, 16, 20, 33, 64, 100])]
    rows = [16, 2, 5, 18, 17, 33][size - 1] if size <= 6 else rng.choice([1, 2, 15, 16, 17, rng.randint(1, 40)])
    kind = {"scale": (size - 1) % 4 if size <= 8 else rng.randrange(4), "dtype": size % 2}
    gap = 0 if size <= 4 else rng.choice([0, 0, 1, 24])
    return {"rows": rows, "dim": dims[(size - 1) % len(dims)], "gap": gap, **kind, "seed": rng.randrange(1000)}


def show_rows(workload: dict[str, Any]) -> str:
    """Describe a launch."""
    dtype = str(DTYPES[workload["dtype"]]).removeprefix("torch.")
    gap = f", {workload['dim'] + workload['gap']} apart" if workload["gap"] else ""
    rows = f"{amount(workload['rows'], 'row')} of {amount(workload['dim'], 'number')} in {dtype}{gap}"
    return f"{rows}; x has the size {SCALES[workload['scale']]:g}"


class Launch:
    """The tensors of a launch, and what is right: in float64, but for the rounding of the sum."""

    def __init__(self, workload: dict[str, Any], with_residual: bool):
        rows, dim, gap = workload["rows"], workload["dim"], workload["gap"]
        if min(rows, dim) < 1 or gap < 0 or workload["dtype"] not in (0, 1) or workload["scale"] not in range(4):
            raise Invalid
        generator = torch.Generator().manual_seed(workload["seed"])
        self.dtype, self.eps = DTYPES[workload["dtype"]], 1e-5
        scale = SCALES[workload["scale"]]
        self.x = (torch.randn(rows, dim + gap, generator=generator) * scale).to(self.dtype)[:, :dim]
        self.residual = (torch.randn(rows, dim, generator=generator) * scale).to(self.dtype) if with_residual else None
        self.weight = (torch.rand(dim, generator=generator) + 0.5).to(self.dtype)
        self.given = [each.clone() for each in self.inputs]
        self.exact = self.x.double() if self.residual is None else self.x.double() + self.residual.double()
        self.total = self.exact.to(self.dtype)
        self.block = 1 << (dim - 1).bit_length()

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors that the kernel reads."""
        return [self.x, self.weight, *([] if self.residual is None else [self.residual])]

    def norm(self, value: Tensor, **other: Any) -> Tensor:
        """Return the RMSNorm of ``value``, or with ``other`` that of a mistake, in the launch's dtype."""
        wide = value.double()
        if other.get("center"):
            wide = wide - wide.mean(1, keepdim=True)
        square = wide * wide
        mean = square.sum(1, keepdim=True) / (self.block if other.get("block") else value.shape[1])
        if other.get("across"):
            tiles = [tile.sum() / value.shape[1] for tile in square.split(TILE)]
            mean = torch.cat([each.expand(min(TILE, len(value) - i * TILE), 1) for i, each in enumerate(tiles)])
        eps = self.eps if other.get("eps", True) is True else 0.0
        scale = (mean + eps) ** other.get("power", -0.5)
        if other.get("eps") == "outside":
            scale = 1 / (mean.sqrt() + self.eps)
        weight = self.weight.double()
        if other.get("weight") == "none":
            weight = torch.ones_like(weight)
        elif other.get("weight") == "plus":
            weight = 1 + weight
        result: Tensor = wide * scale * weight
        return result.to(self.dtype)

    def half(self) -> Tensor:
        """Return the RMSNorm whose squares and sum are in the launch's dtype."""
        square = (self.total * self.total).double().sum(1, keepdim=True).to(self.dtype).double()
        return (self.total.double() / (square / self.x.shape[1] + self.eps).sqrt() * self.weight.double()).to(
            self.dtype
        )

    def off(self, got: Tensor, right: Tensor) -> float:
        """Return the largest difference in units of the last place."""
        step = torch.finfo(self.dtype).eps * right.double().abs().clamp_min(
            1e-4 if self.dtype == torch.float16 else 1e-30
        )
        same = (got == right) | (got.isnan() & right.isnan())
        return float(torch.where(same, 0.0, (got.double() - right.double()).abs() / step).nan_to_num(1e9).max())

    def same(self, got: Tensor, right: Tensor) -> bool:
        """Return whether a result is this one, apart from roundings of float32."""
        if self.dtype == torch.float32:
            return self.off(got, right) <= 32
        few = int((got != right).sum()) <= max(0.08 * got.numel(), 1)
        return few and self.off(got, right) <= 2


def run_kernel(student: Student, workload: dict[str, Any], with_residual: bool) -> Accesses:
    """Run one launch, and compare its results and its accesses."""
    launcher, launch = launcher_of(student), Launch(workload, with_residual)
    with Accesses(launch.x, {"weight": launch.weight, "residual": launch.residual}) as accesses:
        if with_residual:
            found = launcher.add_norm(launch.x, launch.residual, launch.weight, launch.eps)
        else:
            found = launcher.norm(launch.x, launch.weight, launch.eps), None
    accesses.raise_first()
    for now, was in zip(launch.inputs, launch.given, strict=True):
        if not torch.equal(now, was):
            raise Broken("changes", "The kernel changes no argument.", "x, residual or weight has other numbers now.")
    judge(launch, found[0], found[1], accesses)
    return accesses


def judge(launch: Launch, out: Tensor, total: Tensor | None, accesses: Accesses) -> None:
    """Compare the results, and name the mistake that leads to just these."""
    for name, result in (("out", out), ("total", total)):
        if result is not None and (missing := accesses.unwritten(result)):
            seen = f"{amount(missing, 'number')} of `{name}`, which has {list(result.shape)}, were not written."
            raise Broken("unwritten", "The kernel writes all numbers of its results.", seen)
    if total is not None and launch.off(total, launch.total) > 1:
        raise Broken("sum", "`total` is x + residual.", worst(total, launch.total))
    right = launch.norm(launch.total)
    if launch.same(out, right):
        return
    seen = worst(out, right)
    promise = "Each row is divided by the root of its mean square plus eps, and multiplied by the weight."
    if accesses.poisoned and not out.isfinite().all():
        raise Broken("other", "Masked numbers change no result.", seen)
    others = [
        ("block", launch.norm(launch.total, block=True)),
        ("eps", launch.norm(launch.total, eps=False)),
        ("eps", launch.norm(launch.total, eps="outside")),
        ("center", launch.norm(launch.total, center=True)),
        ("root", launch.norm(launch.total, power=-1.0)),
        ("root", launch.norm(launch.total, power=-0.25)),
        ("root", launch.norm(launch.total, power=0.5)),
        ("weight", launch.norm(launch.total, weight="none")),
        ("weight", launch.norm(launch.total, weight="plus")),
        ("across", launch.norm(launch.total, across=True)),
        ("unrounded", launch.norm(launch.exact)),
        ("half", launch.half()),
    ]
    for cause, other in others:
        if launch.same(out, other) and not launch.same(other, right):
            raise Broken(cause, promise, seen)
    if launch.dtype == torch.float16 and (not out.isfinite().all() or launch.off(out, right) < 100):
        raise Broken("half", promise, seen)
    raise Broken("wrong", promise, seen)


def worst(got: Tensor, right: Tensor) -> str:
    """Describe the number that is farthest off."""
    at = int((got.double() - right.double()).abs().nan_to_num(1e9).argmax())
    row, column = divmod(at, got.shape[1])
    return f"Row {row}, column {column} is {float(got[row, column]):.6g}; expected {float(right[row, column]):.6g}."


def run_norm(student: Student, workload: dict[str, Any]) -> None:
    """Grade the kernel without the addition."""
    run_kernel(student, workload, with_residual=False).check_reads()


def run_add(student: Student, workload: dict[str, Any]) -> None:
    """Grade the kernel with the addition."""
    run_kernel(student, workload, with_residual=True).check_reads()


def count_bytes(student: Student) -> str:
    """Count the bytes of both kernels for 64 rows."""
    workload = {"rows": 64, "dim": 96, "gap": 0, "scale": 0, "dtype": 0, "seed": 1}
    counted = [run_kernel(student, workload, with_residual).nbytes for with_residual in (False, True)]
    numbers = 64 * 96 * 4
    alone, both = counted[0] / numbers, counted[1] / numbers
    if alone > 2.2 or both > 4.2:
        seen = f"The kernels move {alone:.2f} and {both:.2f} times the bytes of x."
        raise Broken("twice", "The norm moves 2 times the bytes of x, the fused kernel 4 times, and the weight.", seen)
    return f"{alone:.2f} and {both:.2f} times the bytes of x; an addition and a norm in two launches move 5"


@cache
def _manager() -> PluginManager:
    return PluginManager.load()


def run_model(student: Student) -> str:
    """Compare `tutor`'s logits with the student's kernels with those of torch, and count the launches."""
    path, ids = resolve_model("tutor"), torch.arange(100, 140)
    sizes: dict[str, Any] = {"max_seq_len": 64, "max_running_requests": 1, "manager": _manager(), "kernels": "torch"}
    right = PagedModel(path, **sizes).run([(0, 0, ids)])[0].float()
    mine = PagedModel(path, **sizes)
    launcher_of(student)
    student.make(device=CPU).after_loading(mine.model)
    with counted_launches() as launches:
        got = mine.run([(0, 0, ids)])[0].float()
    norms = sum(isinstance(module, RMSNormFused) for module in mine.model.modules())  # type: ignore[attr-defined]
    if len(launches) < norms:
        seen = (
            f"tutor adds and normalises {norms} times, and a forward pass launched {amount(len(launches), 'kernel')}."
        )
        raise Broken("never-called", "Each norm of a model is a launch of a kernel.", seen)
    off = float((got - right).norm() / right.norm())
    if not off < 1e-4:
        raise Broken("wrong", "tutor's logits are those with torch's norms.", f"They differ by {100 * off:.3f} %.")
    return f"{len(launches)} launches; tutor's logits differ by {off:.1e} of their norm"


@contextlib.contextmanager
def counted_launches() -> Iterator[list[str]]:
    """Yield a list to which the name of each kernel is appended that is interpreted in the context."""
    from triton.runtime.interpreter import GridExecutor

    launches, call = [], GridExecutor.__call__

    def counted(executor: Any, *args: Any, **kwargs: Any) -> Any:
        launches.append(executor.fn.__name__)
        return call(executor, *args, **kwargs)

    GridExecutor.__call__ = counted
    try:
        yield launches
    finally:
        GridExecutor.__call__ = call


# ---- the number to beat -------------------------------------------------------------------------------------------

ENOUGH, TIMES = 0.52, "times the places of tiles of 16 rows and a power of two"
"""The number to beat. Tiles of fewer rows reach 0.79, or 0.74 if the rows choose them; columns in two parts 0.46."""
THREADS = 128
"""Threads of a program: four warps, as Triton has it. An access of fewer places occupies them all."""
MOST_PLACES = 16 * 1024
"""Places of an access for which a program has registers."""


def spread(rng: random.Random, low: int, high: int) -> list[int]:
    """Return a number from each quarter of the range from ``low`` to ``high``, in random order."""
    width = (high + 1 - low) / 4
    numbers = [low + int((i + rng.random()) * width) for i in range(4)]
    rng.shuffle(numbers)
    return numbers


def shapes(rng: random.Random) -> list[dict[str, Any]]:
    """Return the launches of steps with few rows and with many, for rows whose length is no power of two.

    Each kind of step has each kind of length once, so that the draw changes the number little.
    """
    rows = [[1] * 4, spread(rng, 3, 7), spread(rng, 15, 16), spread(rng, 25, 30), spread(rng, 36, 42)]
    dims = [spread(rng, *ends) for ends in ((260, 320), (520, 640), (260, 384), (520, 640))]
    return [
        {"rows": of[i], "dim": dims[(i + j) % 4][i], "gap": 0, "scale": 0, "dtype": 0, "seed": rng.randrange(1000)}
        for i in range(4)
        for j, of in enumerate(rows)
    ]


def measure_stretch(student: Student) -> tuple[str, bool]:
    """Compare the places of `add_norm`, masked or not, with those of whole tiles, on shapes that no file knows."""
    found = whole = 0
    for workload in shapes(student.random):
        accesses = run_kernel(student, workload, with_residual=True)
        accesses.check_reads()
        if not all(accesses.reads[address] for address in accesses.x_addresses.ravel().tolist()):
            return "a kernel that does not read x itself", False
        sizes = [pointers.size for pointers, _, _ in accesses.log]
        if max(sizes) > MOST_PLACES:
            return f"a tile of {max(sizes):,} places, and a program has registers for {MOST_PLACES:,}", False
        found += sum(max(size, THREADS) for size in sizes)
        block = 1 << (workload["dim"] - 1).bit_length()
        whole += -(-workload["rows"] // TILE) * (4 * TILE + 1) * block
    return f"{found / whole:.2f} {TIMES}", round(found / whole, 2) <= ENOUGH


GATES = (
    Gate(
        "norm",
        "RMSNorm of rows of any length and distance, within their memory",
        search(make_rows, run_norm, tries=60, at_least=12, show=show_rows),
        part="fuse.norm",
    ),
    Gate(
        "add",
        "the sum and its norm in one pass",
        search(make_rows, run_add, tries=60, at_least=12, show=show_rows),
        part="fuse.add",
    ),
    Gate("bytes", "each number is read once and written once", count_bytes),
    Gate("model", "tutor computes the same with both kernels", run_model, limit=60.0),
    facts(["after_loading"]),
)
STRETCH = Stretch(
    "A masked place moves no byte, but it takes a register and a thread. A launch of few rows has many masked places, "
    f"and so has one of rows of 600 numbers. Compute `add_norm` with {ENOUGH:.2f} times the places of the reference, "
    f"which has 1.00. An access counts for at least {THREADS} places, and a tile has at most {MOST_PLACES:,}. You may "
    "change `Launcher`. The shapes are new in each run.",
    measure_stretch,
)

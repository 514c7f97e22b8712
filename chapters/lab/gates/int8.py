"""Gates of lab `int8`: packing, activations and the product, each alone, then the C++ product, `tutor` and the server.

What is right follows from the definition of a block, in float64. Bytes are counted, and never time.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from minisgl.chapters.lab.grader.gate import Broken, Gate, Invalid, Stretch, Student, amount
from minisgl.chapters.lab.grader.search import search
from minisgl.chapters.lab.grader.server_gate import facts
from minisgl.models.resolve import resolve_model
from minisgl.plugin_manager.manager import PluginManager
from minisgl.testing.paged import PagedModel

SERVER = ["quantize=int8"]
CPU, BLOCK = torch.device("cpu"), 32
DTYPES = (torch.float32, torch.bfloat16)
KINDS = (
    "normal",
    "all zeros",
    "tiny",
    "with one large number",
    "largest is negative",
    "all equal",
    "large",
    "1e-8",
    "1e-5",
)
"""Kinds of blocks."""
PACK = "No number of a block is off by more than half a step, the block's largest absolute value / 127."
PRODUCT = "The product is the sum over the blocks of (sum of products of integers) * scale of x * scale of the weight."


def module_of(student: Student) -> Any:
    """Return the student's module, with the names of the skeleton that the gates use."""
    schema = student.plugin_manager.schema(student.lab.hook or "", student.lab.name)
    module = sys.modules[schema.__module__]
    for name in ("Packed", "pack", "round_rows", "product"):
        if not hasattr(module, name):
            seen = f"The file has no `{name}`."
            raise Broken("lacks-name", "The file has `Packed`, `pack`, `round_rows` and `product`.", seen)
    return module


# ---- blocks -------------------------------------------------------------------------------------------------


def make_blocks(rng: random.Random, size: int) -> dict[str, Any]:
    """Return the sizes of a random matrix, and the kinds of its blocks. The first workloads have one kind each."""
    kinds = [size - 1] if size <= len(KINDS) else [rng.randrange(len(KINDS)) for _ in range(rng.randint(1, 9))]
    sizes = {"rows": rng.randint(2, 5), "blocks": rng.randint(2, 5)}
    return {**sizes, "kinds": kinds, "dtype": rng.choice([0, 0, 1]), "seed": rng.randrange(1000)}


def show_blocks(workload: dict[str, Any]) -> str:
    """Describe a matrix."""
    kinds = ", ".join(KINDS[kind] for kind in workload["kinds"])
    dtype = str(DTYPES[workload["dtype"]]).removeprefix("torch.")
    return f"{amount(workload['rows'], 'row')} of {amount(workload['blocks'], 'block')} in {dtype}: {kinds}"


def matrix(workload: dict[str, Any]) -> Tensor:
    """Return the matrix [rows, 32 * blocks] of a workload."""
    rows, blocks, kinds = workload["rows"], workload["blocks"], workload["kinds"]
    least = 1 if "outputs" in workload else 2  # a single row or block would not tell some mistakes apart
    if rows < least or blocks < least or not kinds or not all(0 <= kind < len(KINDS) for kind in kinds):
        raise Invalid
    generator = torch.Generator().manual_seed(workload["seed"])
    found = torch.randn(rows * blocks, BLOCK, generator=generator)
    for i, block in enumerate(found):
        kind = KINDS[kinds[i % len(kinds)]]
        if kind == "all zeros":
            block.zero_()
        elif kind in ("tiny", "1e-8", "1e-5", "large"):
            block.mul_({"tiny": 1e-3, "1e-8": 1e-8, "1e-5": 1e-5, "large": 3e3}[kind])
        elif kind == "with one large number":
            block[i % BLOCK] = 40.0
        elif kind == "largest is negative":
            block[i % BLOCK] = -5.0
        elif kind == "all equal":
            block.fill_(-0.3)
    return found.view(rows, -1).to(DTYPES[workload["dtype"]])


def check_blocks(integers: Any, scales: Any, given: Tensor, dtype: torch.dtype, names: tuple[str, str]) -> None:
    """Compare integers and scales with the numbers that they stand for, and name the mistake.

    A number may be off by half a step, and by what the rounding of its scale to ``dtype`` changes. A scale that is
    rounded to 0 leaves only zeros.
    """
    shape = (len(given), given.shape[1] // BLOCK)
    for name, value, wanted, size in (
        (names[0], integers, torch.int8, (*shape, BLOCK)),
        (names[1], scales, dtype, shape),
    ):
        if not isinstance(value, Tensor) or value.dtype != wanted or tuple(value.shape) != size:
            got = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            seen = f"`{name}` is {got}; expected {wanted} {list(size)}."
            raise Broken("form", "Integers are int8 [rows, blocks, 32], with a scale for each block.", seen)
    numbers = given.double().view(*shape, BLOCK)
    exact = scales.double()
    found = integers.double() * exact.unsqueeze(2)
    largest = numbers.abs().amax(2)
    step = largest / 127
    rounded, spacing = (exact - step).abs(), spacing_of(step, dtype)
    ulps = 1.01 if dtype == torch.float16 else 8  # a product with 1 / 127 is a few roundings off
    limit = 0.505 * torch.maximum(step, exact).unsqueeze(2) + integers.double().abs() * rounded.unsqueeze(2) + 1e-12
    limit += (largest * (exact == 0)).unsqueeze(2)
    bad = ~((found - numbers).abs() <= limit).all(2) | (rounded > ulps * spacing)
    if not bad.any():
        check_steps(numbers, scales.double(), step, dtype)
        return
    row, block = (int(i) for i in bad.nonzero()[0])
    values, q, scale = numbers[row, block], integers[row, block].double(), float(scales[row, block])
    where = f"Row {row}, block {block}, with numbers up to {float(largest[row, block]):.3g} and the scale {scale:.3g}: "
    if not torch.isfinite(scales).all() or not torch.isfinite(found).all():
        raise Broken("zeros", PACK, f"{where}the numbers that the integers stand for are not finite.")
    column = int((found[row, block] - values).abs().argmax())
    was, now = float(values[column]), float(found[row, block, column])
    seen = f"{where}column {column} is {was:.4g}, and became {int(q[column])}, which stands for {now:.4g}."
    raise Broken(_mistake(numbers, scales.double(), row, block, q), PACK, seen)


def spacing_of(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the distance between two neighbours of ``dtype`` near each number, and at least that near 0."""
    kind = torch.finfo(dtype)
    return torch.exp2(torch.floor(torch.log2(numbers.clamp(min=kind.smallest_normal)))) * kind.eps


def _other_scales(numbers: Tensor, scales: Tensor) -> str | None:
    """Return the mistake that leads to just these scales of a matrix, or None."""
    largest = numbers.abs()
    for cause, other in (
        ("row", largest.amax((1, 2)).unsqueeze(1)),
        ("tensor", largest.amax()),
        ("sign", numbers.amax(2)),
        ("column", largest.amax((0, 2))),
    ):
        wanted = (other / 127).expand(scales.shape)
        if bool(((scales - wanted).abs() <= 2e-3 * wanted.abs() + 6e-8).all()):
            return cause
    return None


def _mistake(numbers: Tensor, scales: Tensor, row: int, block: int, q: Tensor) -> str:
    """Return the cause of a wrong block: the mistake that leads to just these integers or scales."""
    values, scale = numbers[row, block], scales[row, block]
    own = values.abs().amax() / 127
    exact = values / scale if scale > 0 else torch.zeros_like(values)
    whole = exact.round()
    if whole.abs().amax() > 127 and torch.equal(q, (whole + 128) % 256 - 128):
        return "wraps"
    if (scale - own).abs() > 2e-3 * own + 6e-8:
        return _other_scales(numbers, scales) or ("clips" if scale < own else "steps")
    cut = exact.trunc(), exact.floor()
    return "truncates" if any(torch.equal(q, each.clamp(-127, 127)) for each in cut) else "off"


def check_steps(numbers: Tensor, scales: Tensor, step: Tensor, dtype: torch.dtype) -> None:
    """Raise `Broken` if a step is larger than the numbers of its block need."""
    large = scales > 1.02 * step + (1e-7 if dtype == torch.float16 else 1e-30)
    if large.any():
        row, block = (int(i) for i in large.nonzero()[0])
        seen = f"Row {row}, block {block} has the scale {float(scales[row, block]):.4g}; "
        seen += f"{float(step[row, block]):.4g} is enough."
        cause = _other_scales(numbers, scales) or "steps"
        raise Broken(cause, "The steps are as small as the numbers of the block allow.", seen)


def run_pack(student: Student, workload: dict[str, Any]) -> None:
    """Grade `pack` alone."""
    module, weight = module_of(student), matrix(workload)
    given = weight.clone()
    packed = module.pack(weight)
    if not torch.equal(weight, given):
        raise Broken("changes", "`pack` does not change the weight.", "The weight has other numbers afterwards.")
    if not hasattr(packed, "integers") or not hasattr(packed, "scales"):
        raise Broken("form", "`pack` returns a `Packed`.", f"It returned {type(packed).__name__}.")
    check_blocks(packed.integers, packed.scales, given, torch.float16, ("integers", "scales"))
    other = module.pack(given + 1)
    if other.integers.data_ptr() == packed.integers.data_ptr():
        raise Broken("changes", "Each call returns new tensors.", "Two weights have the same memory.")


def run_round(student: Student, workload: dict[str, Any]) -> None:
    """Grade `round_rows` alone: the integers, and that no row depends on another."""
    module, x = module_of(student), matrix(workload)
    given = x.clone()
    found = module.round_rows(x)
    if not torch.equal(x, given):
        raise Broken("changes", "`round_rows` does not change x.", "x has other numbers afterwards.")
    if not isinstance(found, Sequence) or len(found) != 2:
        raise Broken("form", "`round_rows` returns integers and scales.", f"It returned {type(found).__name__}.")
    integers, scales = found
    if len(x) > 1 and isinstance(scales, Tensor) and scales.shape[:1] == (len(x),):
        for row in range(len(x)):
            alone = module.round_rows(given[row : row + 1])
            if not (torch.equal(alone[0][0], integers[row]) and torch.equal(alone[1][0], scales[row])):
                seen = f"Row {row} of {len(x)} has other integers or scales than alone."
                raise Broken("rows", "A row does not depend on the other rows (promise 8).", seen)
    if isinstance(scales, Tensor) and scales.dtype == torch.float32 and scales.shape == (len(x), x.shape[1] // BLOCK):
        exact = given.float().view(len(x), -1, BLOCK).abs().amax(2) / 127
        if torch.equal(scales, exact.half().float()) and not torch.allclose(scales, exact, rtol=1e-5, atol=0):
            seen = "The scales are those in float16."
            raise Broken("scale-rounded", "The scales of activations are in float32, and not rounded.", seen)
    check_blocks(integers, scales, given, torch.float32, ("integers", "scales"))


# ---- the product ---------------------------------------------------------------------------------------------


def make_product(rng: random.Random, size: int) -> dict[str, Any]:
    """Return the sizes of a product, and the kinds of the blocks of x and of the weight."""
    kinds = [0] if size == 1 else [rng.choice([0, 0, 1, 3, 4]) for _ in range(rng.randint(1, 5))]
    sizes = {"rows": rng.randint(1, 4), "blocks": rng.choice([1, 2, 3, 8]), "outputs": rng.randint(1, 20)}
    if size % 8 == 2:  # many rows: another way for these gives a row another result
        sizes["rows"] = rng.choice([8, 16, 33, 70])
    return {**sizes, "kinds": kinds, "dtype": rng.choice([0, 0, 0, 1]), "bias": rng.randrange(2), "seed": size}


def show_product(workload: dict[str, Any]) -> str:
    """Describe a product."""
    bias = "with" if workload["bias"] else "without"
    return f"x has {show_blocks(workload)}\nthe weight has {amount(workload['outputs'], 'output')}, {bias} a bias"


def packed_weight(module: Any, weight: Tensor) -> Any:
    """Return a weight in integers, packed by the gate, so that a product is graded alone."""
    blocks = weight.float().view(len(weight), -1, BLOCK)
    scales = (blocks.abs().amax(2) / 127).half()
    step = scales.float().unsqueeze(2)
    integers = torch.where(step > 0, blocks / step, 0.0).round().clamp(-127, 127).to(torch.int8)
    return module.Packed(integers, scales)


def run_product(student: Student, workload: dict[str, Any]) -> None:
    """Compare `product` with its definition, computed in float64 from the student's own `round_rows`."""
    module, x = module_of(student), matrix(workload)
    outputs = workload["outputs"]
    if outputs < 1 or workload["bias"] not in (0, 1):
        raise Invalid
    generator = torch.Generator().manual_seed(workload["seed"] + 1)
    weight = torch.randn(outputs, x.shape[1], generator=generator)
    bias = torch.randn(outputs, generator=generator).to(x.dtype) if workload["bias"] else None
    packed = packed_weight(module, weight)
    before = [x.clone(), packed.integers.clone(), packed.scales.clone()]
    got = module.product(x, packed, bias)
    for name, now, was in zip(("x", "integers", "scales"), (x, packed.integers, packed.scales), before, strict=True):
        if not torch.equal(now, was):
            raise Broken("changes", "`product` changes nothing.", f"`{name}` has other numbers afterwards.")
    judge_product(module, x, packed, bias, got)
    for row in sorted({0, 1, len(x) // 2, len(x) - 1} & {*range(len(x))}):
        alone = module.product(x[row : row + 1], packed, bias)
        if not torch.equal(alone[0], got[row]):
            seen = f"Row {row} of {len(x)} has another result than alone."
            close = torch.allclose(
                alone[0].float(), got[row].float(), rtol=1e-3, atol=1e-3 * float(got[row].abs().max())
            )
            cause = "inexact" if close else "rows"
            raise Broken(cause, "A row's result does not depend on the other rows (promise 8).", seen)


def check_exact(module: Any) -> None:
    """Raise `Broken` if the sum of integers, which is 0 here, is not: then the scales were there before the sum."""
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        ups, downs = torch.randint(1, 100, (2, BLOCK // 2), generator=generator).float()
        ups[0] = 127.0  # so `round_rows` finds these integers again
        x = torch.stack((ups, downs), 1).view(1, BLOCK) * (0.3 + torch.rand(1, generator=generator))
        weight = torch.stack((downs, -ups), 1).view(1, 1, BLOCK).to(torch.int8)
        scale = (0.01 + 0.1 * torch.rand(1, 1, generator=generator)).half()
        found = float(module.product(x, module.Packed(weight, scale), None))
        if found != 0.0:
            promise = "The sum of 32 products of integers is exact. Only then come the scales."
            seen = f"The 32 products of a block add up to 0, and the result is {found:.3g}."
            raise Broken("inexact", promise, seen)


def try_product(student: Student) -> str:
    """Search for a wrong product, and then look for scales before the sum."""
    note = search(make_product, run_product, tries=100, at_least=8, show=show_product)(student)
    if student.replay is None:
        check_exact(module_of(student))
    return note


def judge_product(module: Any, x: Tensor, packed: Any, bias: Tensor | None, got: Any) -> None:
    """Compare a product with its definition, and name the mistake that leads to just this result."""
    shape = (len(x), len(packed.scales))
    if not isinstance(got, Tensor) or got.dtype != x.dtype or tuple(got.shape) != shape:
        what = f"{got.dtype} {list(got.shape)}" if isinstance(got, Tensor) else type(got).__name__
        seen = f"`product` returned {what}; expected {x.dtype} {list(shape)}."
        raise Broken("form", "`product` returns [rows, outputs] in the dtype of x.", seen)
    integers, factors = module.round_rows(x)
    xi, wi = integers.double(), packed.integers.double()
    xs, ws = factors.double(), packed.scales.double()
    added = 0.0 if bias is None else bias.double()
    sums = torch.einsum("rbi,obi->rbo", xi, wi)
    terms = sums * xs.unsqueeze(2) * ws.T
    right = terms.sum(1) + added
    near = 1e-5 * (terms.abs().sum(1) + abs(added)) + 1e-6  # the roundings of sums in float32
    last = 0.0 if x.dtype == torch.float32 else 0.55 * torch.finfo(x.dtype).eps  # the rounding of a result, once

    def same(other: Tensor) -> bool:
        larger = max(float(other.abs().max() / right.abs().max().clamp_min(1e-30)), 1.0)  # and so are its roundings
        return bool(((got.double() - other).abs() <= larger * near + last * other.abs()).all())

    if same(right):
        return
    large = (wi * ws.unsqueeze(2)).flatten(1)
    small = (xi * xs.unsqueeze(2)).flatten(1)
    wrapped = {bits: (sums + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1) for bits in (8, 16)}
    total = sums.sum(1)
    others = [
        ("not-rounded", x.double() @ large.T + added),
        ("no-scale", (sums * ws.T).sum(1) + added),
        ("no-scale", (sums * xs.unsqueeze(2)).sum(1) + added),
        ("no-scale", total + added),
        ("overflow", (wrapped[8] * xs.unsqueeze(2) * ws.T).sum(1) + added),
        ("overflow", (wrapped[16] * xs.unsqueeze(2) * ws.T).sum(1) + added),
        ("one-scale", total * xs[:, :1] * ws[:, 0] + added),
        ("one-scale", (sums * xs.unsqueeze(2)).sum(1) * ws[:, 0] + added),
        ("one-scale", (sums * ws.T).sum(1) * xs[:, :1] + added),
        ("one-scale", total * xs.mean(1, keepdim=True) * ws.mean(1) + added),
        ("bias", right - added),
        ("bias", right + added),
        ("bias", right + added * (ws.shape[1] - 1)),
        ("bias", right + added * ws.shape[1]),
    ]
    worst = int(((got.double() - right).abs() / (near + last * right.abs())).nan_to_num(1e9).argmax())
    row, output = divmod(worst, shape[1])
    seen = f"Row {row}, output {output} is {float(got[row, output]):.6g}; expected {float(right[row, output]):.6g}."
    for cause, other in others:
        if same(other) and not bool(((other - right).abs() <= near + last * right.abs()).all()):
            raise Broken(cause, PRODUCT, seen)
    close = bool(((got.double() - small @ large.T - added).abs() <= 1e3 * near).all())
    raise Broken("rounds" if close else "wrong", PRODUCT, seen)


class Largest(TorchDispatchMode):
    """A dispatch mode that records in ``nbytes`` the size of the largest tensor that an operation made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes, self.name = 0, ""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        views = [each.alias_info is not None for each in function._schema.returns]
        results = found if isinstance(found, (tuple, list)) else [found]
        if not any(views):
            for each in results:
                if isinstance(each, Tensor) and each.nbytes > self.nbytes:
                    self.nbytes, self.name = each.nbytes, str(function.__name__)
        return found


def run_bytes(student: Student) -> str:
    """Measure the largest tensor that a product of one row makes."""
    module = module_of(student)
    generator = torch.Generator().manual_seed(1)
    outputs, columns = 256, 64 * BLOCK
    packed = packed_weight(module, torch.randn(outputs, columns, generator=generator))
    x = torch.randn(1, columns, generator=generator)
    with Largest() as largest:
        got = module.product(x, packed, None)
    judge_product(module, x, packed, None, got)
    most = packed.integers.nbytes
    if largest.nbytes > most:
        promise = "For few rows, no tensor of the product is larger than the packed integers."
        seen = f"`{largest.name}` made a tensor of {largest.nbytes:,} bytes; the integers have {most:,}."
        raise Broken("large-again", promise, seen)
    return f"the largest tensor has {largest.nbytes:,} bytes; the integers have {most:,}"


def run_cpp(student: Student) -> str:
    """Compare `pack` and `product` together with the shipped product, in C++ where there is a compiler."""
    from minisgl.plugins.kernels.ops import grouped
    from minisgl.plugins.kernels.ops.cpp.grouped import serves

    module = module_of(student)
    generator = torch.Generator().manual_seed(student.random.randrange(10**6))
    weight, x = torch.randn(40, 320, generator=generator), torch.randn(5, 320, generator=generator)
    packed = module.pack(weight)
    parts = packed.integers.view(torch.uint8), packed.scales.float().unsqueeze(2), None
    shipped = grouped.grouped_linear(x, grouped.pack(grouped.Form(8), 40, 320, [parts]))
    off = float((module.product(x, packed, None) - shipped).abs().max() / shipped.abs().max())
    if not off < 2e-3:  # a number of x between two integers may go to either
        promise = "With the same integers, the product is that of plugins/kernels/ops/cpp/grouped.cpp."
        raise Broken("wrong", promise, f"The largest difference is {100 * off:.2f} % of the largest result.")
    where = "C++" if serves(x) else "the shipped product in torch"
    return f"the largest difference from {where} is {off:.1e} of the largest result"


# ---- tutor ----------------------------------------------------------------------------------------------------


@cache
def _manager() -> PluginManager:
    return PluginManager.load()


def logits_of(options: Any, build: Any = None) -> tuple[Tensor, nn.Module]:
    """Return logits of `tutor` [positions, vocabulary] and the model; ``options`` None: without quantisation."""
    more = {} if options is None else {"quantize": "int8", "quantization_options": options}
    model = PagedModel(resolve_model("tutor"), max_seq_len=96, max_running_requests=1, manager=_manager(), **more)
    ids = torch.arange(100, 164)
    module = model.model
    assert isinstance(module, nn.Module)
    return model.run([(0, 0, ids)])[0].float(), module


def held_bytes(model: nn.Module) -> tuple[int, int]:
    """Return the bytes of all tensors that the linear layers of a model hold, and how many numbers they stand for."""
    from minisgl.layers.linear import LinearColParallelMerged, LinearQKVMerged, LinearRowParallel

    held, numbers = {}, 0
    plain = logits_of(None)[1]
    sizes = {name: each.numel() for name, each in plain.named_parameters()}
    for name, layer in model.named_modules():
        if isinstance(layer, LinearColParallelMerged | LinearQKVMerged | LinearRowParallel):
            numbers += sizes[f"{name}.weight"]
            for tensor in tensors_in(vars(layer), 4):
                held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(held.values()), numbers


def tensors_in(value: Any, depth: int) -> Iterator[Tensor]:
    """Yield the tensors in a value, in containers, and in objects of the student's classes."""
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, (dict, list, tuple)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(each, depth - 1)
    elif depth and is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            yield from tensors_in(getattr(value, each.name, None), depth - 1)
    elif depth and type(value).__module__.startswith(("my_", "minisgl_plugin")):
        yield from tensors_in(dict(getattr(value, "__dict__", {})), depth - 1)


def cost(student: Student, **options: Any) -> tuple[float, float]:
    """Return the bytes for each number of `tutor`'s linear layers, and the relative error of its logits."""
    plain, _ = logits_of(None)
    got, model = logits_of(student.config(**options))
    held, numbers = held_bytes(model)
    return held / numbers, float((got - plain).norm() / plain.norm())


def run_model(student: Student) -> str:
    """Measure the bytes and the error of `tutor` in integers."""
    held, error = cost(student)
    if held > 1.07:
        seen = f"The linear layers hold {held:.2f} bytes for each number."
        raise Broken("keeps", "A layer holds the packed weight, and no other: 1.0625 bytes a number.", seen)
    if not error < 0.05:
        seen = f"The logits differ by {100 * error:.1f} % of their norm."
        raise Broken("far", "tutor's logits differ by less than 5 % of their norm from those in float32.", seen)
    return f"{held:.2f} bytes a number instead of 4, and logits {100 * error:.1f} % off"


MOST_BYTES, MOST_ERROR = 0.82, 0.06


def measure_stretch(student: Student) -> tuple[str, bool]:
    """Measure the student's own form, `form=own`, or without this option the form of the gates."""
    own = {"form": "own"} if "form" in student.options() else {}
    held, error = cost(student, **own)
    return f"{held:.2f} bytes a number, {100 * error:.1f} % off", held <= MOST_BYTES and error <= MOST_ERROR


GATES = (
    Gate(
        "pack",
        "a weight in integers, each number off by at most half a step",
        search(make_blocks, run_pack, tries=120, at_least=len(KINDS), show=show_blocks),
        part="int8.pack",
    ),
    Gate(
        "round",
        "activations in integers, each row alone",
        search(make_blocks, run_round, tries=120, at_least=len(KINDS), show=show_blocks),
        part="int8.round",
    ),
    Gate(
        "product",
        "the product is exact in integers, and then scaled",
        try_product,
        part="int8.product",
        needs=("round",),
    ),
    Gate("bytes", "the weight never becomes large again", run_bytes),
    Gate("cpp", "the result is that of the shipped product", run_cpp, limit=300.0),
    Gate("model", "tutor in integers: the bytes of its layers, and the error of its logits", run_model, limit=60.0),
    facts(["before_loading", "after_loading"]),
)
STRETCH = Stretch(
    "The form of the gates takes 1.06 bytes a number, and tutor's logits are 2.3 % off. Reach at most "
    f"{MOST_BYTES} bytes with at most {100 * MOST_ERROR:.0f} %, in a form of your own that an option `form=own` of "
    "your plugin selects.",
    measure_stretch,
)

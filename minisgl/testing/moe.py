"""A kit to test expert backends with: random tokens and routings, and the definition, pair by pair, as the oracle.

The oracle computes every (token, choice) pair alone, in float64, and sorts nothing. `count` says what a backend read
and multiplied. Knows `minisgl.moe` and no expert plugin: whoever writes one can test it with this.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minisgl.moe import MoeBackend

__all__ = ["CASES", "Counts", "MoeCase", "MoeConformance", "Problem", "count", "problem"]


@dataclass(frozen=True)
class MoeCase:
    """``tokens`` tokens choose ``top_k`` of ``experts`` experts: of all, or only of those that ``chosen`` names.
    ``here`` are the experts whose weights the backend is given (empty: all of them)."""

    tokens: int
    top_k: int = 2
    experts: int = 6
    chosen: tuple[int, ...] = ()
    here: range = range(0)
    hidden: int = 32
    inner: int = 24
    activation: str = "silu"
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        more = f", all of {list(self.chosen)}" * bool(self.chosen) + f", {self.here} here" * bool(self.here)
        kind = f" {str(self.dtype).removeprefix('torch.')} {self.activation}"
        return f"{self.tokens} tokens, top {self.top_k} of {self.experts} experts{more},{kind}"


_PLAIN = MoeCase(17)
CASES: tuple[MoeCase, ...] = (
    MoeCase(1, top_k=1, experts=1),
    MoeCase(1, top_k=1),
    MoeCase(1),
    MoeCase(2),
    replace(_PLAIN, experts=2),
    _PLAIN,
    replace(_PLAIN, chosen=(1, 4)),  # the others get nobody, the last one too
    replace(_PLAIN, chosen=(5,), top_k=1),
    replace(_PLAIN, top_k=6),  # every token chooses every expert
    MoeCase(3, experts=64, top_k=8),
    MoeCase(200, top_k=3),
    replace(_PLAIN, here=range(2, 5)),  # other ranks have the experts before and after
    replace(_PLAIN, here=range(0, 2), chosen=(3, 5)),  # nothing for this rank
    replace(_PLAIN, activation="gelu"),
    replace(_PLAIN, dtype=torch.bfloat16),
)
"""From the smallest: every number of experts, choices and tokens, and experts that nobody chose."""


class Problem(NamedTuple):
    """One call of a backend: ``gate_up``, ``down`` are the experts ``here``; the rest is what `forward` is given."""

    gate_up: Tensor
    down: Tensor
    here: range
    x: Tensor
    ids: Tensor
    scale: Tensor

    def solve(self, backend: MoeBackend, activation: str = "silu") -> Tensor:
        """What the backend makes of it. What it should write is NaN before."""
        weights = backend.load(self.gate_up, self.down, self.here, activation)
        return backend.forward(weights, self.x, self.ids, self.scale, torch.full_like(self.x, float("nan")))

    def pair(self, token: int, choice: int, activation: str = "silu") -> Tensor:
        """What one choice of one token adds to it, [hidden] in float64; zeros where its expert is elsewhere."""
        expert = int(self.ids[token, choice])
        if expert not in self.here:
            return torch.zeros(self.x.shape[1], dtype=torch.float64)
        gate_up, down = (w[expert - self.here.start].double().cpu() for w in (self.gate_up, self.down))
        gate, up = (gate_up @ self.x[token].double().cpu()).chunk(2)
        acted = F.silu(gate) if activation == "silu" else F.gelu(gate)
        return float(self.scale[token, choice]) * (down @ (acted * up))

    def answer(self, activation: str = "silu") -> Tensor:
        """[tokens, hidden] in float64: each token's pairs, added up."""
        tokens, top_k = self.ids.shape
        rows = [sum(self.pair(t, c, activation) for c in range(top_k)) for t in range(tokens)]
        return torch.stack(rows)  # type: ignore[arg-type]


def problem(case: MoeCase, device: torch.device | str = "cpu", seed: int = 0) -> Problem:
    """The case's weights, tokens and routing. A token's choices differ from each other, as a router's do."""
    generator = torch.Generator().manual_seed(seed)
    here = case.here or range(case.experts)
    gate_up = torch.randn(case.experts, 2 * case.inner, case.hidden, generator=generator) / case.hidden**0.5
    down = torch.randn(case.experts, case.hidden, case.inner, generator=generator) / case.inner**0.5
    x = torch.randn(case.tokens, case.hidden, generator=generator)
    among = torch.tensor(case.chosen or range(case.experts))
    top_k = min(case.top_k, len(among))
    scale, at = torch.rand(case.tokens, len(among), generator=generator).topk(top_k)
    mine = slice(here.start, here.stop)
    gate_up, down, x = (tensor.to(device, case.dtype) for tensor in (gate_up[mine], down[mine], x))
    return Problem(gate_up, down, here, x, among[at].int().to(device), scale.to(device))


class Counts(NamedTuple):
    """What a call cost: matrix products (``gemms``), experts whose weights were read, counted again each time
    (``experts``: gate-up and down are one expert), and rows that were multiplied with the first matrix (``rows``)."""

    gemms: int
    experts: float
    rows: int


def count(backend: MoeBackend, problem: Problem) -> Counts:
    """Solve the problem with plain torch operations, and count them. On CPU tensors."""
    weights = backend.load(problem.gate_up, problem.down, problem.here, "silu")
    out = torch.empty_like(problem.x)
    with _Counter(problem) as counter:
        backend.forward(weights, problem.x, problem.ids, problem.scale, out)
    one = problem.gate_up[0].numel() + problem.down[0].numel()
    return Counts(counter.gemms, counter.read / one, counter.rows)


class _Counter(TorchDispatchMode):
    """Sees every torch operation: which of them multiply, and how much of the weights each is given."""

    def __init__(self, problem: Problem):
        super().__init__()
        tensors = (problem.gate_up, problem.down)
        self._weights = {x.untyped_storage().data_ptr() for x in tensors}
        self._two_inner, self._hidden = problem.gate_up.shape[1:]
        self.gemms = self.read = self.rows = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        given = [x for x in args if isinstance(x, Tensor)]
        ours = [x for x in given if x.untyped_storage().data_ptr() in self._weights]
        if name in ("mm", "addmm", "bmm", "baddbmm", "linear", "_grouped_mm", "matmul", "mv", "addmv"):
            self.gemms += 1
            self.read += sum(x.numel() for x in ours)
            if isinstance(out, Tensor) and out.shape[-1] == self._two_inner:
                self.rows += out.numel() // self._two_inner
        elif ours and isinstance(out, Tensor) and not _is_view(out, ours):
            self.read += out.numel()  # it made a copy of weights, or of some experts' weights
        return out


def _is_view(out: Tensor, of: list[Tensor]) -> bool:
    return any(out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for x in of)


class MoeConformance:
    """What every expert backend must do. Subclass it in a test file, name it ``Test…`` and say how to make yours."""

    device = "cpu"
    cases = CASES
    """Leave out what yours refuses."""
    tolerance = 1e-5
    """Greatest difference in float32; in bfloat16 it is 3e-2."""

    def make(self) -> MoeBackend:
        """Your backend."""
        raise NotImplementedError

    def test_the_sum_of_the_chosen_experts(self) -> None:
        backend = self.make()
        for case in self.cases:
            given = problem(case, self.device)
            got, want = given.solve(backend, case.activation).double().cpu(), given.answer(case.activation)
            eps = 3e-2 if case.dtype == torch.bfloat16 else self.tolerance
            wrong = ~torch.isclose(got, want, atol=eps, rtol=eps).all(1)
            if wrong.any():
                token = int(wrong.nonzero()[0])
                ids, off = given.ids[token].tolist(), float((got - want)[token].abs().max())
                raise AssertionError(f"{case}: token {token}, which chose experts {ids}, is off by {off:.3g}")

    def test_it_writes_into_out_and_leaves_its_inputs(self) -> None:
        backend, given = self.make(), problem(MoeCase(9), self.device)
        kept = [x.clone() for x in (given.x, given.ids, given.scale)]
        weights = backend.load(given.gate_up, given.down, given.here, "silu")
        out = torch.full_like(given.x, float("nan"))
        got = backend.forward(weights, given.x, given.ids, given.scale, out)
        assert got.data_ptr() == out.data_ptr(), "the result is not in `out`"
        for name, before, after in zip(("x", "ids", "scale"), kept, (given.x, given.ids, given.scale), strict=True):
            assert torch.equal(before, after), f"forward changed {name}"

    def test_ranges_of_experts_add_up(self) -> None:
        """Ranks may hold different experts: each writes the sum of its own, and the layer all-reduces."""
        whole = MoeCase(40)
        backend, want = self.make(), problem(whole, self.device).answer()
        parts = [problem(replace(whole, here=here), self.device) for here in (range(2), range(2, 5), range(5, 6))]
        got = torch.stack([part.solve(backend).double().cpu() for part in parts]).sum(0)
        off = float((got - want).abs().max())
        assert off < 10 * self.tolerance, f"three ranks' sums add up to something else: off by {off:.3g}"

    def test_a_call_does_not_remember_the_one_before(self) -> None:
        backend = self.make()
        given, other = problem(MoeCase(5), self.device), problem(MoeCase(11, chosen=(0, 3)), self.device, seed=1)
        first = given.solve(backend)
        other.solve(backend)
        assert torch.equal(given.solve(backend), first), "the same call gives another result after a different one"

"""A conformance kit for MoE backends: random tokens and routings, compared with a direct computation in float64.

The direct computation handles each (token, chosen expert) pair alone, without sorting. `count` measures the cost of a
backend. The kit uses only the interface `minisgl.plugins.moe`, so it applies to every MoE plugin.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minisgl.plugins.moe import MoeBackend

__all__ = ["CASES", "Counts", "MoeCase", "MoeConformance", "Problem", "WeightCounter", "count", "problem"]


@dataclass(frozen=True)
class MoeCase:
    """The sizes and the routing of a test: ``tokens`` tokens choose ``top_k`` of ``experts`` experts each.

    - ``chosen``: the experts that tokens choose from; empty: all experts.
    - ``local_experts``: the experts whose weights the backend has; empty: all experts.
    - ``hidden``: width of a token's hidden state. ``inner``: width between the two matrices of an expert.
    """

    tokens: int
    top_k: int = 2
    experts: int = 6
    chosen: tuple[int, ...] = ()
    local_experts: range = range(0)
    hidden: int = 32
    inner: int = 24
    activation: str = "silu"
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        more = f", chosen from {list(self.chosen)}" * bool(self.chosen)
        more += f", {self.local_experts} on this rank" * bool(self.local_experts)
        kind = f" {str(self.dtype).removeprefix('torch.')} {self.activation}"
        tokens = f"{self.tokens} token" + "s" * (self.tokens != 1)
        return f"{tokens}, top {self.top_k} of {self.experts} experts{more},{kind}"


_PLAIN = MoeCase(17)
CASES: tuple[MoeCase, ...] = (
    MoeCase(1, top_k=1, experts=1),
    MoeCase(1, top_k=1),
    MoeCase(1),
    MoeCase(2),
    replace(_PLAIN, experts=2),
    _PLAIN,
    replace(_PLAIN, chosen=(1, 4)),  # experts 0, 2, 3 and 5 get no token
    replace(_PLAIN, chosen=(5,), top_k=1),
    replace(_PLAIN, top_k=6),  # every token chooses every expert
    MoeCase(3, experts=64, top_k=8),
    MoeCase(200, top_k=3),
    replace(_PLAIN, local_experts=range(2, 5)),  # other ranks have the experts before and after
    replace(_PLAIN, local_experts=range(0, 2), chosen=(3, 5)),  # no token chooses an expert of this rank
    replace(_PLAIN, activation="gelu"),
    replace(_PLAIN, dtype=torch.bfloat16),
)
"""The default cases: different numbers of tokens, choices and experts, and unchosen experts."""


class Problem(NamedTuple):
    """The weights and the arguments of one call of a backend."""

    gate_up: Tensor  # [local experts, 2 * inner, hidden]
    down: Tensor  # [local experts, hidden, inner]
    local_experts: range
    x: Tensor  # [tokens, hidden]
    ids: Tensor  # [tokens, top_k] int32: the chosen experts
    scale: Tensor  # [tokens, top_k] float32: the routing weights

    def solve(self, backend: MoeBackend, activation: str = "silu") -> Tensor:
        """Return the backend's result, [tokens, hidden]. The tensor that it must fill contains NaN before."""
        weights = backend.load(self.gate_up, self.down, self.local_experts, activation)
        return backend.forward(weights, self.x, self.ids, self.scale, torch.full_like(self.x, float("nan")))

    def pair(self, token: int, choice: int, activation: str = "silu") -> Tensor:
        """Return the contribution of one choice to its token's result, [hidden] in float64.

        Zeros if the chosen expert is not on this rank.
        """
        expert = int(self.ids[token, choice])
        if expert not in self.local_experts:
            return torch.zeros(self.x.shape[1], dtype=torch.float64)
        gate_up, down = (w[expert - self.local_experts.start].double().cpu() for w in (self.gate_up, self.down))
        gate, up = (gate_up @ self.x[token].double().cpu()).chunk(2)
        acted = F.silu(gate) if activation == "silu" else F.gelu(gate)
        return float(self.scale[token, choice]) * (down @ (acted * up))

    def answer(self, activation: str = "silu") -> Tensor:
        """Return the expected result, [tokens, hidden] in float64: for each token, the sum of `pair` of its choices."""
        tokens, top_k = self.ids.shape
        rows = [sum(self.pair(t, c, activation) for c in range(top_k)) for t in range(tokens)]
        return torch.stack(rows)  # type: ignore[arg-type]


def problem(case: MoeCase, device: torch.device | str = "cpu", seed: int = 0) -> Problem:
    """Build random weights, tokens and routing for a case. A token never chooses the same expert twice."""
    generator = torch.Generator().manual_seed(seed)
    local_experts = case.local_experts or range(case.experts)
    gate_up = torch.randn(case.experts, 2 * case.inner, case.hidden, generator=generator) / case.hidden**0.5
    down = torch.randn(case.experts, case.hidden, case.inner, generator=generator) / case.inner**0.5
    x = torch.randn(case.tokens, case.hidden, generator=generator)
    among = torch.tensor(case.chosen or range(case.experts))
    top_k = min(case.top_k, len(among))
    scale, at = torch.rand(case.tokens, len(among), generator=generator).topk(top_k)
    local = slice(local_experts.start, local_experts.stop)
    gate_up, down, x = (tensor.to(device, case.dtype) for tensor in (gate_up[local], down[local], x))
    return Problem(gate_up, down, local_experts, x, among[at].int().to(device), scale.to(device))


class Counts(NamedTuple):
    """The cost of a call of a backend.

    - ``gemms``: number of matrix products.
    - ``experts``: weights that were read, in experts (gate-up and down matrix). A second read counts again.
    - ``rows``: rows that were multiplied with a gate-up matrix.
    """

    gemms: int
    experts: float
    rows: int


def count(backend: MoeBackend, problem: Problem) -> Counts:
    """Run the backend on the problem and count its torch operations. All tensors must be on the CPU."""
    weights = backend.load(problem.gate_up, problem.down, problem.local_experts, "silu")
    out = torch.empty_like(problem.x)
    with WeightCounter(problem) as counter:
        backend.forward(weights, problem.x, problem.ids, problem.scale, out)
    one = problem.gate_up[0].numel() + problem.down[0].numel()
    return Counts(counter.gemms, counter.read / one, counter.rows)


class WeightCounter(TorchDispatchMode):
    """Counts matrix products and the weight elements that torch operations read, while it is active."""

    def __init__(self, problem: Problem):
        super().__init__()  # type: ignore[no-untyped-call]
        tensors = (problem.gate_up, problem.down)
        self._weights = {x.untyped_storage().data_ptr() for x in tensors}
        self._two_inner, self._hidden = problem.gate_up.shape[1:]
        self.gemms = self.read = self.rows = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the base class would import torch's compiler, which takes a second and is not needed

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
            self.read += out.numel()  # the operation copied weights
        return out


def _is_view(out: Tensor, of: list[Tensor]) -> bool:
    return any(out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for x in of)


class MoeConformance:
    """The tests that every MoE backend must pass.

    Subclass it in a test file, give the subclass a name that begins with ``Test``, and implement `make`.
    """

    device = "cpu"
    cases = CASES
    """The cases to test. Leave out the cases that your backend does not support."""
    dtype = torch.float32
    """The dtype of the tests that do not use ``cases``."""
    tolerance = 1e-5
    """``atol`` and ``rtol`` of torch.isclose in float32. In bfloat16 and float16, 3e-2 is used for each of them."""

    def make(self) -> MoeBackend:
        """Build your backend."""
        raise NotImplementedError("make(self) must return the MoE backend to test")

    def test_chosen_experts(self) -> None:
        """The result of each token is the weighted sum of its chosen experts, in all cases."""
        backend = self.make()
        for case in self.cases:
            given = problem(case, self.device)
            got, want = given.solve(backend, case.activation).double().cpu(), given.answer(case.activation)
            eps = self.tolerance if case.dtype == torch.float32 else 3e-2
            wrong = ~torch.isclose(got, want, atol=eps, rtol=eps).all(1)
            if wrong.any():
                token = int(wrong.nonzero()[0])
                ids, off = given.ids[token].tolist(), float((got - want)[token].abs().max())
                raise AssertionError(
                    f"{case}: the result of token {token}, which chose experts {ids}, is off by {off:.3g}; expected at "
                    f"most {eps:g}"
                )

    def test_out_and_inputs(self) -> None:
        """``forward`` writes into ``out`` and returns it, and does not change its inputs."""
        backend, given = self.make(), problem(MoeCase(9, dtype=self.dtype), self.device)
        kept = [x.clone() for x in (given.x, given.ids, given.scale)]
        weights = backend.load(given.gate_up, given.down, given.local_experts, "silu")
        out = torch.full_like(given.x, float("nan"))
        got = backend.forward(weights, given.x, given.ids, given.scale, out)
        assert got.data_ptr() == out.data_ptr(), "the result is not in `out`: forward returned another tensor"
        for name, before, after in zip(("x", "ids", "scale"), kept, (given.x, given.ids, given.scale), strict=True):
            assert torch.equal(before, after), f"forward changed {name}; expected that its inputs stay unchanged"

    def test_expert_ranges(self) -> None:
        """The results of ranks that have different experts add up to the result of one rank with all experts."""
        whole = MoeCase(40, dtype=self.dtype)
        backend, want = self.make(), problem(whole, self.device).answer()
        ranges = (range(2), range(2, 5), range(5, 6))
        parts = [problem(replace(whole, local_experts=local), self.device) for local in ranges]
        got = torch.stack([part.solve(backend).double().cpu() for part in parts]).sum(0)
        off = float((got - want).abs().max())
        most = 10 * self.tolerance if self.dtype == torch.float32 else 3e-2
        assert off < most, (
            f"the sum of the results of three ranks with different experts is off by {off:.3g}; expected less than "
            f"{most:g}"
        )

    def test_no_state_between_calls(self) -> None:
        """The result of a call does not depend on the calls before it."""
        backend = self.make()
        given = problem(MoeCase(5, dtype=self.dtype), self.device)
        other = problem(MoeCase(11, chosen=(0, 3), dtype=self.dtype), self.device, seed=1)
        first = given.solve(backend)
        other.solve(backend)
        assert torch.equal(given.solve(backend), first), (
            "the same call gives another result after a call with other tokens; expected equal results"
        )

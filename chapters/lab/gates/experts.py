"""Gates of lab `experts`: each step alone, the whole layer, the weights that it reads, `tutor-moe`, and the server.

A wrong result is diagnosed with linear algebra. A token's result is a weighted sum of the experts' answers to the
token. Solving for the weights shows which experts the student's code used, and with which weights.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.chapters.lab.grader.conformance import conformance
from minisgl.chapters.lab.grader.gate import Broken, Gate, Invalid, Stretch, Student, amount, apart
from minisgl.chapters.lab.grader.held import container_sizes
from minisgl.chapters.lab.grader.launches import EXPERTS, TOKENS, TOP_K, launches_of_experts
from minisgl.chapters.lab.grader.search import search
from minisgl.chapters.lab.grader.server_gate import facts
from minisgl.chapters.lab.grader.tutor_runs import moe_logits
from minisgl.chapters.lab.grader.two_devices import TwoDevices
from minisgl.testing.moe import MoeCase, MoeConformance, Problem, count, problem

CPU = torch.device("cpu")
SERVER = ["model=tutor-moe", "server.served_model_name=tutor"]
HIDDEN, INNER = 24, 10
PROMISE = "Each token gets the weighted sum of the experts that it chose."
UNCHANGED = "A later call changes no earlier result."


def backend(student: Student, block: int = 4) -> Any:
    """Return the student's MoE backend, with ``block`` rows in a block if its config has this option."""
    config = student.config()
    if hasattr(config, "block"):
        config.block = block
    return student.make(config, device=CPU)


# ---- workloads: which token chose which experts -----------------------------------------------------------


def make(rng: random.Random, size: int) -> dict[str, Any]:
    """Return a random routing: the experts that each token chose, and the experts of this rank."""
    if size == 6:  # more pairs than 16 bits can count, and more of one expert than a buffer of a fixed size may hold
        return {"experts": 300, "first": 0, "here": 300, "block": 16, "tokens": [], "many": 40_000}
    if size == 4:  # as many experts and choices as real models have
        return {"experts": 40, "first": 0, "here": 40, "block": 4,
                "tokens": [rng.sample(range(40), 8) for _ in range(40)]}  # fmt: skip
    if size == 5:  # more experts than a byte can count
        tokens = [rng.sample(range(300), 2) for _ in range(20)]
        return {"experts": 300, "first": 0, "here": 300, "block": 1, "tokens": [*tokens, [299, 7]]}
    if size in (7, 8, 9):  # a power of two of experts, so that `experts` itself needs one more bit than their numbers
        here = (256, 128, rng.choice([127, 129, 255, 257]))[size - 7]
        first = rng.choice([0, rng.randint(here + 1, 2 * here)])
        ours = rng.sample(range(first, first + here), 6)
        others = [e for e in (0, 1, first + here, first + 2 * here) if not first <= e < first + here]
        tokens = [rng.sample([*ours, first + here - 1, *others], 2) for _ in range(20)]
        tokens = [chosen if len(set(chosen)) == 2 else [first, others[0]] for chosen in tokens]
        return {"experts": first + 2 * here + 1, "first": first, "here": here, "block": 4, "tokens": tokens}
    if size in (10, 11, 12):  # as many pairs: so the number of a padding entry needs one more bit than the pairs
        return {"experts": 8, "first": 2, "here": 4, "block": 16, "tokens": [], "many": 1 << (7, 14, 15)[size - 10]}
    if size in (13, 14):  # each token chooses all experts, or all but one
        return {"experts": 9, "first": 0, "here": 9, "block": 4,
                "tokens": [rng.sample(range(9), 22 - size) for _ in range(12)]}  # fmt: skip
    experts = rng.randint(1, min(2 + size // 2, 9))
    top_k = rng.randint(1, min(3, experts))
    among = rng.sample(range(experts), rng.randint(top_k, experts))  # no token chooses any of the other experts
    tokens = [rng.sample(among, top_k) for _ in range(rng.randint(1, 1 + size))]
    first = rng.randint(0, experts - 1) if rng.random() < 0.25 else 0
    here = rng.randint(1, experts - first) if first or rng.random() < 0.25 else experts
    return {
        "experts": experts,
        "first": first,
        "here": here,
        "block": rng.choice([1, 2, 3, 4, 12, 50]),
        "tokens": tokens,
    }


def show(workload: dict[str, Any]) -> str:
    """Describe the routing in one line per token."""
    first, here, experts = workload["first"], workload["here"], workload["experts"]
    lines = [f"{amount(experts, 'expert')}, blocks of {amount(workload['block'], 'row')}"]
    if here != experts:
        which = f"expert {first} is" if here == 1 else f"experts {first} to {first + here - 1} are"
        lines[0] += f"; {which} on this rank, so `sort` gets the chosen numbers less {first}, and {here} for `experts`"
    if workload.get("many"):
        lines.append(f"each of {amount(workload['many'], 'token')} chose 2 experts")
    lines += [f"token {t} chose {' and '.join(map(str, chosen))}" for t, chosen in enumerate(workload["tokens"])]
    return "\n".join(lines)


def ids_of(workload: dict[str, Any]) -> Tensor:
    """Return the chosen experts, [tokens, top_k] int32. Raise `Invalid` if no router would choose them."""
    tokens, experts, first, here = (workload[key] for key in ("tokens", "experts", "first", "here"))
    if workload.get("many"):
        if experts < 2 or here < 1 or first + here > experts or workload["block"] < 1:
            raise Invalid
        generator, n = torch.Generator().manual_seed(4), workload["many"]
        common = torch.rand(n, generator=generator) < 0.9  # most tokens choose expert 0
        first_choice = torch.randint(experts, (n,), generator=generator).masked_fill(common, 0)
        step = torch.randint(1, experts, (n,), generator=generator)
        return torch.stack((first_choice, (first_choice + step) % experts), 1).int()
    if not tokens or len({len(chosen) for chosen in tokens}) != 1 or not tokens[0] or workload["block"] < 1:
        raise Invalid
    if any(len(set(chosen)) < len(chosen) or max(chosen) >= experts for chosen in tokens):
        raise Invalid
    if here < 1 or first + here > experts:
        raise Invalid
    return torch.tensor(tokens, dtype=torch.int32)


def problem_of(workload: dict[str, Any]) -> Problem:
    """Return the workload with random weights, tokens and scales."""
    ids = ids_of(workload)
    here = range(workload["first"], workload["first"] + workload["here"])
    case = MoeCase(len(ids), ids.shape[1], workload["experts"], local_experts=here, hidden=HIDDEN, inner=INNER)
    return problem(case)._replace(ids=ids)


# ---- the parts ------------------------------------------------------------------------------------------


def run_sort(student: Student, workload: dict[str, Any]) -> None:
    """Grade `sort` alone. A backend without this method is graded as a whole."""
    moe, ids = backend(student, workload["block"]), ids_of(workload)
    if not hasattr(moe, "sort"):
        return run_whole(student, workload)
    flat, here, block = ids.flatten() - workload["first"], workload["here"], workload["block"]
    expert = flat.clone()
    result = moe.sort(expert, here)
    wrong = wrong_order(result, flat, here, block)
    if wrong is not None:
        raise wrong
    pairs, counts = result[0].clone(), list(result[1])
    if not workload.get("many"):
        check_device("sort", [expert], lambda: moe.sort(expert, here)[0])
    if not torch.equal(expert, flat):
        seen = "After `sort`, the tensor `expert` had other numbers than before."
        raise Broken("changes", "A backend changes no tensor of its caller but `out`.", seen)
    backend(student, block + 1)  # another layer's or another engine's, with other blocks
    other = torch.where((flat >= 0) & (flat < here), (flat + 1) % here, flat).flip(0)
    expert.copy_(other)
    wrong = wrong_order(moe.sort(expert, here), other, here, block)
    if wrong is not None:
        again = wrong_order(backend(student, block).sort(expert, here), other, here, block)
        seen = f"The first call of `sort` was right. In the second, the tensor has other numbers. {wrong.seen}"
        raise again or Broken(
            "kept", "Each step is computed from its own routing, with the blocks of its backend.", seen
        )
    if not torch.equal(result[0], pairs) or list(result[1]) != counts:
        seen = "After a second call of `sort`, the result of the first had other numbers."
        raise Broken("reused", UNCHANGED, seen)


def wrong_order(got: Any, flat: Tensor, here: int, block: int) -> Broken | None:
    """Return the finding for the result of `sort` of the experts ``flat``, or None."""
    promise = "`sort` returns the pairs of each expert, one expert after another, each padded to whole blocks."
    if not isinstance(got[0], Tensor) or got[0].is_floating_point() or got[0].device != flat.device:
        kind = str(got[0].dtype) if isinstance(got[0], Tensor) else type(got[0]).__name__
        seen = f"The pair numbers are a {kind}."
        raise Broken("results", "`sort` returns a tensor of integers and a list of counts.", seen)
    if isinstance(got[1], Tensor):
        raise Broken("results", "`sort` returns a tensor of integers and a list of counts.", "The counts are a tensor.")
    pairs, counts = got[0].tolist(), [int(n) for n in got[1]]
    want = [set((flat == e).nonzero().flatten().tolist()) for e in range(here)]
    if len(counts) != here or sum(counts) != len(pairs):
        seen = (
            f"For {amount(here, 'expert')} it returned {amount(len(counts), 'count')} with the sum {sum(counts)}, and "
            f"{amount(len(pairs), 'pair')}."
        )
        return Broken("empty" if len(counts) < here else "padding", promise, seen)
    begin = 0
    for e, n in enumerate(counts):
        mine, begin = pairs[begin : begin + n], begin + n
        real = [pair for pair in mine if pair != len(flat)]
        more = Counter(mine) - Counter(want[e])
        if n == -(-len(want[e]) // block) * block and want[e] <= set(mine) and set(more) - {len(flat)}:
            seen = (
                f"Expert {e} has {amount(len(want[e]), 'pair')} and {n - len(want[e])} padding entries. One of "
                f"these entries is {min(more)}; it must be {len(flat)}, the number of pairs."
            )
            return Broken("padding", promise, seen)
        wrong = [pair for pair in real if pair not in want[e]]
        if wrong:
            seen = f"The rows of expert {e} contain pair {wrong[0]}, which {_choice_of(wrong[0], flat, here)}."
            known = 0 <= wrong[0] < len(flat) and not 0 <= int(flat[wrong[0]]) < here
            return Broken("other-rank" if known else "mixed", promise, seen)
        lost = sorted(want[e] - set(real))
        if lost or len(real) != len(set(real)):
            missing = f"Pair {lost[0]} chose expert {e}, but is not in that expert's rows." if lost else ""
            return Broken("lost", promise, missing or f"The rows of expert {e} contain a pair twice.")
        if n != -(-len(real) // block) * block:
            seen = (
                f"Expert {e} has {amount(len(real), 'pair')} in {amount(n, 'row')}, which are not the fewest whole "
                f"blocks of {amount(block, 'row')}."
            )
            cause = "many-blocks" if n > len(real) and n % block == 0 else "padding"
            return Broken(cause if real else "empty-block", promise, seen)
    return None


def _choice_of(pair: int, flat: Tensor, here: int) -> str:
    if not 0 <= pair < len(flat):
        return "does not exist"
    expert = int(flat[pair])
    return f"chose expert {expert}" if 0 <= expert < here else "chose an expert of another rank"


def run_multiply(student: Student, workload: dict[str, Any]) -> None:
    """Grade `multiply` alone. A backend without this method is graded as a whole."""
    moe, given = backend(student, workload["block"]), problem_of(workload)
    if not hasattr(moe, "multiply"):
        return run_whole(student, workload)
    chosen = Counter((given.ids.flatten() - workload["first"]).tolist())
    counts = [chosen[e] for e in range(workload["here"])]
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(sum(counts), HIDDEN, generator=generator)
    if len(rows) % 4 == 3:
        rows[: next(filter(None, counts))] = 0.0  # such rows count too
    name, act = ("gelu", F.gelu) if len(rows) % 2 else ("silu", F.silu)
    weights, mine = moe.load(given.gate_up, given.down, given.local_experts, name), rows.clone()
    before = given.gate_up.clone(), given.down.clone()
    given_counts = list(counts)
    result = moe.multiply(weights, mine, given_counts)
    got = result.clone()
    if given_counts != counts:
        seen = f"After `multiply`, `counts` was {_some(given_counts)} instead of {_some(counts)}."
        raise Broken("changes", "`multiply` changes no argument, except `rows`.", seen)
    promise = "`multiply` multiplies the rows of expert e with expert e's matrices, and keeps the order of the rows."
    if tuple(got.shape) != tuple(rows.shape):
        seen = (
            f"The input has {len(rows)} rows and the result has the shape {list(got.shape)}; counts: {_some(counts)}."
        )
        raise Broken("lost", promise, seen)
    begin = 0
    for e, n in enumerate(counts):
        part, out = rows[begin : begin + n], got[begin : begin + n]
        begin += n
        if n and not torch.allclose(out, _expert(given, e, part, act), atol=1e-4):
            if torch.allclose(out, _expert(given, e, part), atol=1e-4):
                seen = "The outputs of experts with the activation gelu are those of silu."
                raise Broken("activation", "The activation of a layer is the one that `load` got.", seen)
            used = [i for i in range(workload["here"]) if torch.allclose(out, _expert(given, i, part, act), atol=1e-4)]
            what = f"the matrices of expert {used[0]}" if used else "no expert's matrices"
            seen = f"The rows of expert {e} were multiplied with {what}; rows of each expert: {_some(counts)}."
            raise Broken("empty" if used and 0 in counts[:e] else "expert", promise, seen)
    if not all(map(torch.equal, before, (given.gate_up, given.down))):
        seen = "After `multiply`, the experts' weights were others than before."
        raise Broken("changes", "`multiply` changes no tensor that it gets, except `rows`.", seen)
    if workload.get("many"):
        return check_half_multiply(moe)
    tensors = [rows, given.gate_up, given.down]
    check_device("multiply", tensors, lambda: moe.multiply(weights, rows.clone(), counts))
    other = moe.load(-given.gate_up, given.down, given.local_experts, name)
    for layer in (weights, other):
        moe.multiply(layer, 2 * rows, counts)
        if not torch.equal(result, got):
            seen = "After a second call of `multiply` with other rows, the result of the first had other numbers."
            raise Broken("reused", UNCHANGED, seen)
    mine.copy_(-rows)
    again = moe.multiply(weights, mine, counts).clone()
    fresh = backend(student, workload["block"])
    want = fresh.multiply(fresh.load(given.gate_up, given.down, given.local_experts, name), -rows, counts)
    if not torch.allclose(again, want, atol=1e-4):
        seen = "The first call of `multiply` was right. In the second, the same tensor has other numbers."
        raise Broken("kept", "`multiply` multiplies the rows that it is given now.", seen)


def check_half_multiply(moe: Any) -> None:
    """Check `multiply` with weights and rows in bfloat16, as in most models."""
    generator = torch.Generator().manual_seed(6)
    gate_up, down, rows = (
        torch.randn(shape, generator=generator).bfloat16() / 4
        for shape in ((3, 2 * INNER, HIDDEN), (3, HIDDEN, INNER), (5, HIDDEN))
    )
    counts = [2, 0, 3]
    got = moe.multiply(moe.load(gate_up, down, range(3), "silu"), rows.clone(), counts)
    promise = "The outputs of `multiply` have the shape and the dtype of its rows."
    if got.dtype != rows.dtype:
        seen = f"With weights and rows in bfloat16, the outputs of `multiply` are {got.dtype}."
        raise Broken("dtype", promise, seen)
    given = problem(MoeCase(1, 1, 3, hidden=HIDDEN, inner=INNER))._replace(gate_up=gate_up.float(), down=down.float())
    want = torch.cat([_expert(given, e, part.float()) for e, part in enumerate(rows.split(counts))])
    if not torch.allclose(got.float(), want, atol=0.03, rtol=0.03):
        off = float((got.float() - want).abs().max())
        seen = f"With weights and rows in bfloat16, the outputs of `multiply` are off by up to {off:.2g}."
        raise Broken("dtype", promise, seen)


def _some(counts: Sequence[int]) -> str:
    """Return the counts as text: all of up to 12, else the first ones."""
    return str(list(counts)) if len(counts) <= 12 else f"{list(counts)[:8]} and {len(counts) - 8} more"


def _expert(given: Problem, e: int, rows: Tensor, act: Callable[[Tensor], Tensor] = F.silu) -> Tensor:
    gate, up = F.linear(rows, given.gate_up[e]).chunk(2, dim=-1)
    return F.linear(act(gate) * up, given.down[e])


def run_scatter(student: Student, workload: dict[str, Any]) -> None:
    """Grade `scatter` alone, with rows in which column i is 1 for pair i.

    So the result of a token shows which pairs were added, and with which weights. A backend without this method is
    graded as a whole.
    """
    moe, ids = backend(student, workload["block"]), ids_of(workload)
    if not hasattr(moe, "scatter"):
        return run_whole(student, workload)
    if workload.get("many"):
        check_half_scatter(moe)
        return run_large_scatter(moe, ids)
    tokens, top_k = ids.shape
    generator = torch.Generator().manual_seed(2)
    scale = torch.rand(tokens, top_k, generator=generator) + 0.5
    flat, n = ids.flatten() - workload["first"], ids.numel()
    padding = [n] if workload["block"] > 1 else []
    ours = [p for e in range(workload["here"]) for p in [*(flat == e).nonzero().flatten().tolist(), *padding]]
    pairs = torch.tensor(ours, dtype=torch.long)
    rows = torch.zeros(len(ours), n + 1)
    rows[torch.arange(len(ours)), pairs] = 1.0
    out = torch.full((tokens, n + 1), 7.0)
    given = rows.clone(), pairs.clone(), scale.clone()
    got = moe.scatter(*given, out)
    check_returned(got, out)
    copies = [*(x.clone() for x in given), out.clone()]
    check_device("scatter", copies, lambda: moe.scatter(*copies))
    for token in range(tokens):
        line = got[token]
        if float(line[n]) >= 6.5 or bool((line[:n] >= 6.5).any()):
            raise Broken("stale", PROMISE, f"The result of token {token} contains the old contents of `out`.")
        if float(line[n]) != 0:
            raise Broken("padding-row", PROMISE, f"A row of padding was added to token {token}.")
        foreign = [p for p in range(n) if p // top_k != token and abs(float(line[p])) > 1e-5]
        if foreign:
            seen = f"Token {token} got the row of pair {foreign[0]}, which belongs to token {foreign[0] // top_k}."
            raise Broken("permutation", PROMISE, seen)
        for pair in range(token * top_k, (token + 1) * top_k):
            want = float(scale[token, pair % top_k]) if pair in ours else 0.0
            if abs(float(line[pair]) - want) > 1e-5:
                raise _wrong_weight(token, pair, float(line[pair]), want, line, ours, top_k)
    for name, before, after in zip(("rows", "pairs", "scale"), (rows, pairs, scale), given, strict=True):
        if not torch.equal(before, after):
            seen = f"After `scatter`, the tensor `{name}` had other numbers than before."
            raise Broken("changes", "`scatter` writes `out`, and changes no other tensor of its caller.", seen)


def check_device(method: str, given: Sequence[Tensor], call: Callable[[], Tensor]) -> None:
    """Check that all tensors of a method are on the device of its arguments ``given``, and so is its result."""
    devices = TwoDevices(given)
    with devices.follow():
        result = call()
    promise = "Tensors that a backend makes are on the device of its arguments."
    if devices.mixed:
        seen = f"`{method}` makes a tensor without `device=`. If its arguments are on a GPU, `{devices.mixed}` fails."
        raise Broken("device", promise, seen)
    if devices.on_host(result):
        seen = f"If the arguments of `{method}` are on a GPU, its result is a tensor in the host's memory."
        raise Broken("device", promise, seen)


def check_returned(got: Any, out: Tensor) -> None:
    """Check that `scatter` returned ``out``, and no other tensor."""
    if not isinstance(got, Tensor) or got.data_ptr() != out.data_ptr():
        promise = "`scatter` writes the sums into `out` and returns `out`."
        raise Broken("stale", promise, f"For `out` in {out.dtype}, it returned {got!r:.40}, which is not `out`.")


def check_half_scatter(moe: Any) -> None:
    """Check `scatter` with rows and sums in bfloat16, as in most models. The router's weights are float32."""
    promise = "`scatter` writes to `out` in the dtype of `out`."
    rows = torch.tensor([[3.0, 5.0], [1.0, 2.0], [7.0, 7.0]], dtype=torch.bfloat16)
    pairs, scale = torch.tensor([1, 0, 2]), torch.tensor([[0.5, 0.25]])
    out = torch.full((1, 2), 7.0, dtype=torch.bfloat16)
    try:
        got = moe.scatter(rows, pairs, scale, out)
    except RuntimeError as error:
        seen = f"With `rows` and `out` in bfloat16 and `scale` in float32: {str(error).splitlines()[0]}"
        raise Broken("dtype", promise, seen) from error
    if got.dtype == out.dtype:
        check_returned(got, out)
    if got.dtype != out.dtype or not torch.allclose(got.float(), torch.tensor([[1.25, 2.25]]), atol=0.02):
        seen = f"With `rows` and `out` in bfloat16, the sums are {got.tolist()} in {got.dtype}, not [[1.25, 2.25]]."
        raise Broken("dtype", promise, seen)


def run_large_scatter(moe: Any, ids: Tensor) -> None:
    """Grade `scatter` with many pairs, in random order, and some rows of padding, which hold NaN."""
    generator = torch.Generator().manual_seed(5)
    tokens, top_k = ids.shape
    n = ids.numel()
    order = torch.cat((torch.randperm(n, generator=generator), torch.full((7,), n)))
    pairs = order[torch.randperm(n + 7, generator=generator)]
    rows, real = torch.randn(n + 7, 3, generator=generator), pairs < n
    rows[~real] = float("nan")
    scale = torch.rand(tokens, top_k, generator=generator) + 0.5
    got = moe.scatter(rows.clone(), pairs.clone(), scale.clone(), torch.full((tokens, 3), 7.0))
    if bool(got.isnan().any()):
        seen = f"Rows of padding hold NaN, and so do {int(got.isnan().any(1).sum())} results."
        raise Broken("padding-row", PROMISE, seen)
    weighted = rows[real].double() * scale.flatten()[pairs[real]].double()[:, None]
    want = torch.zeros(tokens, 3).double().index_add_(0, pairs[real] // top_k, weighted)
    wrong = (~torch.isclose(got.double(), want, atol=1e-4)).any(1).nonzero().flatten().tolist()
    if wrong:
        seen = (
            f"With {n} pairs of {tokens} tokens, the results of {len(wrong)} tokens are wrong; the first is {wrong[0]}."
        )
        raise Broken("large", PROMISE, seen)


def _wrong_weight(token: int, pair: int, got: float, want: float, line: Tensor, ours: list[int], top_k: int) -> Broken:
    """Return the finding for a pair that was added to its token with the weight ``got`` instead of ``want``."""
    siblings = [p for p in range(token * top_k, (token + 1) * top_k) if p in ours]
    if got == 0:
        added = [p for p in siblings if float(line[p])]
        only = f"; the row of pair {added[0]} was added" if added else ""
        seen = f"The row of pair {pair} was not added to token {token}{only}."
        return Broken("overwrites" if added else "lost", PROMISE, seen)
    shown = apart(got, want)
    seen = f"The row of pair {pair} was multiplied with {shown[0]}; its weight is {shown[1]}."
    return Broken("weights", PROMISE, seen)


# ---- the whole ---------------------------------------------------------------------------------------------


def run_whole(student: Student, workload: dict[str, Any]) -> None:
    """Grade the whole layer against the definition, in two steps of one backend: the routing of the second differs."""
    given, moe = problem_of(workload), backend(student, workload["block"])
    before = [tensor.clone() for tensor in given if isinstance(tensor, Tensor)]
    got = given.solve(moe).double()
    if not all(map(torch.equal, before, (tensor for tensor in given if isinstance(tensor, Tensor)))):
        seen = (
            "After `forward`, the tokens, their experts, the router's weights or the experts' weights were different."
        )
        raise Broken("changes", "`forward` writes `out`, and changes no other tensor of the caller.", seen)
    wrong = first_wrong(given, got)
    if wrong is not None:
        raise wrong
    if workload.get("many"):
        return
    check_out(moe, given)
    # Two layers: both are loaded before either is computed. In the second step, the same tensors have other numbers.
    weights = moe.load(given.gate_up, given.down, given.local_experts, "silu")
    other = given._replace(gate_up=-given.gate_up, down=2 * given.down, local_experts=range(len(given.down)))
    others = moe.load(other.gate_up, other.down, other.local_experts, "gelu")
    x, ids, scale = given.x.clone(), given.ids.clone(), given.scale.clone()
    for what in ("Another layer was loaded after this one.", "The second step has another routing of as many tokens."):
        now = given._replace(x=x, ids=ids, scale=scale)
        wrong = first_wrong(now, moe.forward(weights, x, ids, scale, torch.full_like(x, torch.nan)).double())
        if wrong is not None:
            raise Broken("kept", "Each step is computed from its layer and its own routing.", f"{what} {wrong.seen}")
        ids.copy_(given.ids.flip(0))
        scale.mul_(0.5)
    tensors = [given.gate_up, given.down, x, ids, scale, torch.empty_like(x)]
    check_device("forward", tensors, partial(moe.forward, weights, x, ids, scale, tensors[-1]))
    check_growth(moe, weights, given)
    # A layer whose weights are where those of an earlier layer were, as after an engine has ended.
    del weights
    memory = given._replace(gate_up=given.gate_up.clone(), down=given.down.clone())
    for engine in (moe, backend(student, workload["block"])):
        for _ in range(2):
            wrong = first_wrong(memory, memory.solve(engine).double())
            if wrong is not None:
                seen = f"A layer was loaded from tensors that had other weights before. {wrong.seen}"
                raise Broken("kept", "Each step is computed from its layer and its own routing.", seen)
            memory.gate_up.copy_(memory.gate_up.flip(1))
            memory.down.mul_(-0.5)
    got = moe.forward(others, given.x, given.ids, given.scale, torch.full_like(x, torch.nan)).double()
    if not torch.allclose(got, answer(other, F.gelu), atol=1e-3):
        seen = "The results of a second layer, which has other weights and the activation gelu, are wrong."
        if torch.allclose(got, answer(other), atol=1e-3):
            seen = "The results of a layer with the activation gelu are those of silu."
            raise Broken("activation", "The activation of a layer is the one that `load` got.", seen)
        raise Broken("kept", "Each step is computed from its layer and its own routing.", seen)


def check_out(moe: Any, given: Problem) -> None:
    """Check that `forward` writes and returns its argument `out`, and that a later call changes no earlier result."""
    weights = moe.load(given.gate_up, given.down, given.local_experts, "silu")
    out = torch.full_like(given.x, torch.nan)
    got = moe.forward(weights, given.x, given.ids, given.scale, out)
    promise = "`forward` writes the sums into `out` and returns `out`."
    if not isinstance(got, Tensor) or got.data_ptr() != out.data_ptr():
        right = "holds the right sums" if not bool(out.isnan().any()) else "was not written"
        raise Broken("out", promise, f"`forward` returned another tensor than `out`; `out` {right}.")
    before = out.clone()
    moe.forward(weights, -given.x, given.ids, 2 * given.scale, torch.full_like(given.x, torch.nan))
    if not torch.equal(out, before):
        raise Broken("reused", UNCHANGED, "After a second call of `forward`, the result of the first was another one.")


def check_growth(moe: Any, weights: Any, given: Problem, steps: int = 40) -> None:
    """Check that the backend does not keep something of each step."""
    x = given.x[:1]
    before: dict[str, int] = {}
    for step in range(steps + 2):
        if step == 2:
            before = container_sizes(moe)
        moe.forward(weights, x + step, given.ids[:1], given.scale[:1], torch.empty_like(x))
    grown = {name: n - before.get(name, 0) for name, n in container_sizes(moe).items()}
    name = max(grown, key=grown.__getitem__, default="")
    if grown and grown[name] >= steps:
        seen = f"After {steps} more steps of one token, the backend has {grown[name]} elements more in {name}."
        raise Broken("grows", "The memory of a backend does not grow from step to step.", seen)


def first_wrong(given: Problem, got: Tensor) -> Broken | None:
    """Return the finding for the first wrong token of a result, or None."""
    want = answer(given)
    wrong = (~torch.isclose(got, want, atol=1e-4)).any(1).nonzero().flatten().tolist()
    if wrong and len(want) > 1000:
        seen = f"Of {len(want)} tokens, the results of {len(wrong)} are wrong; the first is token {wrong[0]}."
        return Broken("large", PROMISE, seen)
    return diagnose(given, got, want, wrong[0]) if wrong else None


def answer(given: Problem, act: Callable[[Tensor], Tensor] = F.silu) -> Tensor:
    """Return the right result, [tokens, hidden] in float64."""
    want = torch.zeros(given.x.shape).double()
    precise = given._replace(gate_up=given.gate_up.double(), down=given.down.double(), x=given.x.double())
    for e in given.local_experts:
        token, choice = (given.ids == e).nonzero(as_tuple=True)
        if len(token):
            rows = _expert(precise, e - given.local_experts.start, precise.x[token], act)
            want.index_add_(0, token, rows * given.scale[token, choice].double()[:, None])
    return want


def diagnose(given: Problem, got: Tensor, want: Tensor, token: int) -> Broken:
    """Return the finding for a wrong result: which experts' answers, with which weights, add up to it."""
    mine, chosen = got[token], given.ids[token].tolist()
    if not bool(torch.isfinite(mine).all()):
        return Broken("stale", PROMISE, f"The result of token {token} contains the old contents of `out`.")
    others = [t for t in range(len(want)) if t != token and want[t].any() and torch.allclose(mine, want[t], atol=1e-4)]
    if others:
        return Broken("permutation", PROMISE, f"Token {token} got the result of token {others[0]}.")
    here = list(given.local_experts)
    answers = torch.stack([_expert(given, e - here[0], given.x[token : token + 1])[0].double() for e in here])
    solved = torch.linalg.lstsq(answers.T, mine.unsqueeze(1), driver="gelsd").solution.flatten()
    left = float((answers.T @ solved - mine).abs().max())
    if left > 1e-3:
        seen = f"Token {token} chose experts {chosen}; its result is no weighted sum of any experts' answers to it."
        return Broken("permutation", PROMISE, seen)
    weights = {e: float(w) for e, w in zip(here, solved, strict=True) if abs(float(w)) > 1e-3}
    foreign = [e for e in weights if e not in chosen]
    if foreign:
        seen = f"Token {token} chose experts {chosen}; its result contains the answer of expert {foreign[0]}."
        return Broken("expert", PROMISE, seen)
    missing = [e for e in chosen if e in here and e not in weights]
    if missing:
        cause = "overwrites" if weights else "lost"
        seen = f"Token {token} chose experts {chosen}; its result lacks the answer of expert {missing[0]}."
        return Broken(cause, PROMISE, seen)
    off = max(chosen, key=lambda e: abs(weights.get(e, 0.0) - _scale(given, token, e)))
    right = _scale(given, token, off)
    shown = apart(weights[off], right)
    seen = f"In the result of token {token}, expert {off} has the weight {shown[0]} instead of {shown[1]}."
    return Broken("weights", PROMISE, seen)


def _scale(given: Problem, token: int, expert: int) -> float:
    """Return the router's weight of an expert for a token; 0 for an expert of another rank."""
    at = given.ids[token].tolist().index(expert)
    return float(given.scale[token, at]) if expert in given.local_experts else 0.0


# ---- counts ------------------------------------------------------------------------------------------------


def reads_again(student: Student, block: int, given: Problem) -> bool:
    """Return whether a backend reads an expert twice: more experts than there are, where tokens chose all of them.

    The steps are ``given`` without the experts that no token chose, and a large one.
    """
    chosen, ids = given.ids.unique(return_inverse=True)
    chosen = chosen.long()
    here = range(len(chosen))
    same = given._replace(gate_up=given.gate_up[chosen], down=given.down[chosen], ids=ids.int(), local_experts=here)
    return any(
        count(backend(student, block), each).experts > len(each.gate_up) + 1e-9
        for each in (same, problem(MoeCase(200, experts=8)))
    )


def counts(student: Student) -> str:
    """Count the experts whose weights are read and the rows that are multiplied, for any structure of the code."""
    notes = []
    sizes = ((1, 64), (8, 64), (16, 8), (200, 8), (20_000, 2), (4, 2), (3, 300))
    cases = [MoeCase(tokens, experts=experts) for tokens, experts in sizes]
    rng = student.random
    cases += [MoeCase(rng.randint(2, 60), experts=rng.randint(2, 9)) for _ in range(3)]
    cases += [MoeCase(60, experts=2), MoeCase(60, experts=2, top_k=1)]
    cases.insert(3, replace(cases[1], dtype=torch.bfloat16))  # such weights may be converted, which reads them
    for case in cases:
        given, tokens, experts = problem(case), case.tokens, case.experts
        load = Counter(given.ids.flatten().tolist())
        block = 16
        found = count(backend(student, block), given)
        most = sum(-(-n // block) * block for n in load.values())
        promise = (
            f"{amount(tokens, 'token')} chose {len(load)} of {experts} experts: only their weights are read, each once."
        )
        if found.experts > len(load) + 1e-9:
            pairs = given.ids.numel()
            again = found.experts == pairs != experts or reads_again(student, block, given)
            cause = "again" if again else "reads"
            seen = f"The weights read are those of {found.experts:g} experts (an expert read twice counts twice)."
            raise Broken(cause, promise, seen)
        if found.gemms == 0:
            raise Broken("reads", promise, "No matrix product of torch read the experts' weights.")
        if found.rows > most:
            promise = (
                f"At most {amount(most, 'row')} are multiplied: {given.ids.numel()} pairs in blocks of {block} rows."
            )
            raise Broken("padding", promise, f"The backend multiplied {amount(found.rows, 'row')}.")
        padding = found.rows - given.ids.numel()
        rows = f" and {amount(padding, 'row')} of padding" if padding > 0 else ""
        notes.append(
            f"{amount(tokens, 'token')}: {amount(found.gemms, 'product')} for {len(load)} of {experts} experts{rows}"
        )
    return f"{len(notes)} shapes, such as {notes[0]}; {notes[2]}"


def engine(student: Student) -> str:
    """Compare the logits of `tutor-moe` with the student's backend and with the shipped reference backend."""
    got = student.run(moe_logits, student.lab.lab, str(student.path))
    off = float(np.abs(got - moe_logits()).max())
    if not off < 1e-3:
        promise = "`tutor-moe` computes the same logits with this backend as with the shipped one."
        raise Broken("promise", promise, f"The largest difference of a logit is {off:.3g}.")
    return "tutor-moe computes the same logits with the plugin"


GATES = (
    Gate("sort", "the pairs are sorted by expert, in whole blocks",
         search(make, run_sort, at_least=14, show=show), part="experts.sort"),
    Gate("multiply", "each expert multiplies its own rows",
         search(make, run_multiply, at_least=14, show=show), part="experts.multiply"),
    Gate("scatter", "each token gets the weighted sum of its rows",
         search(make, run_scatter, at_least=14, show=show), part="experts.scatter"),
    Gate("whole", "every routing gives the result that the definition gives",
         search(make, run_whole, at_least=14, show=show)),
    Gate("counts", "the backend reads only the weights of chosen experts, and reads them once", counts),
    conformance(lambda: MoeConformance, lambda student: student.make(device=CPU)),
    Gate("engine", "tutor-moe computes the same logits with the plugin", engine, transcript=True),
    facts(["forward"]),
)  # fmt: skip


MOST_OPERATIONS = 16
"""The number to beat. Batched products whose rows are added to the output take 22."""


def measure_stretch(student: Student) -> tuple[str, bool]:
    """Count the torch operations of the student's experts in a decode step."""
    operations = launches_of_experts(student)
    return f"{operations} operations", operations <= MOST_OPERATIONS


STRETCH = Stretch(
    f"For a decode step of {TOKENS} tokens that choose {TOP_K} of {EXPERTS} experts each, `grouped` takes 205 torch "
    f"operations. Take at most {MOST_OPERATIONS}.",
    measure_stretch,
)

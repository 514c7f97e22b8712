"""Lab `experts`: each step by itself, then the whole against the definition, what it reads, tutor-moe, the server.

What a token got is taken apart by linear algebra: it is a sum of experts' answers to that token, and which experts with
which weights says what went wrong.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.course.lab.grader.conformance import conformance
from minisgl.course.lab.grader.gate import Broken, Gate, Invalid, Student
from minisgl.course.lab.grader.search import search
from minisgl.course.lab.grader.server_gate import facts
from minisgl.testing.moe import MoeCase, MoeConformance, Problem, count, problem

CPU = torch.device("cpu")
SERVER = ["model=tutor-moe", "server.served_model_name=tutor"]
HIDDEN, INNER = 24, 10
PROMISE = "Each token gets the weighted sum of the experts that it chose."


def backend(student: Student, block: int = 4) -> Any:
    """The student's, with blocks of that many rows where it has such an option."""
    config = student.config()
    if hasattr(config, "block"):
        config.block = block
    return student.make(config, device=CPU)


# ---- workloads: who chose whom ----------------------------------------------------------------------------


def make(rng: random.Random, size: int) -> dict[str, Any]:
    experts = rng.randint(1, min(2 + size // 2, 9))
    top_k = rng.randint(1, min(3, experts))
    among = rng.sample(range(experts), rng.randint(top_k, experts))  # nobody chooses the others
    tokens = [rng.sample(among, top_k) for _ in range(rng.randint(1, 1 + size))]
    first = rng.randint(0, experts - 1) if rng.random() < 0.25 else 0
    here = rng.randint(1, experts - first) if first or rng.random() < 0.25 else experts
    return {"experts": experts, "first": first, "here": here, "block": rng.choice([1, 2, 4]), "tokens": tokens}


def show(workload: dict[str, Any]) -> str:
    first, here, experts = workload["first"], workload["here"], workload["experts"]
    whose = "" if here == experts else f", of which {first} to {first + here - 1} are on this rank"
    lines = [f"{experts} experts{whose}, blocks of {workload['block']}"]
    lines += [f"token {t} chose {' and '.join(map(str, chosen))}" for t, chosen in enumerate(workload["tokens"])]
    return "\n".join(lines)


def ids_of(workload: dict[str, Any]) -> Tensor:
    """[tokens, top_k] int32. Raises `Invalid` where a router would not choose so."""
    tokens, experts, first, here = (workload[key] for key in ("tokens", "experts", "first", "here"))
    if not tokens or len({len(chosen) for chosen in tokens}) != 1 or not tokens[0] or workload["block"] < 1:
        raise Invalid
    if any(len(set(chosen)) < len(chosen) or max(chosen) >= experts for chosen in tokens):
        raise Invalid
    if here < 1 or first + here > experts:
        raise Invalid
    return torch.tensor(tokens, dtype=torch.int32)


def problem_of(workload: dict[str, Any]) -> Problem:
    """Random weights, tokens and scales for it."""
    ids = ids_of(workload)
    here = range(workload["first"], workload["first"] + workload["here"])
    case = MoeCase(len(ids), ids.shape[1], workload["experts"], here=here, hidden=HIDDEN, inner=INNER)
    return problem(case)._replace(ids=ids)


# ---- the parts ------------------------------------------------------------------------------------------


def run_sort(student: Student, workload: dict[str, Any]) -> None:
    moe, ids = backend(student, workload["block"]), ids_of(workload)
    if not hasattr(moe, "sort"):
        return run_whole(student, workload)
    flat, here, block = ids.flatten() - workload["first"], workload["here"], workload["block"]
    promise = "sort gives each expert's pairs, one expert after another, each padded to whole blocks."
    pairs, counts = moe.sort(flat.clone(), here)
    pairs, counts = torch.as_tensor(pairs).tolist(), [int(n) for n in counts]
    want = [(flat == e).nonzero().flatten().tolist() for e in range(here)]
    if len(counts) != here or sum(counts) != len(pairs):
        seen = f"For {here} experts there are {len(counts)} counts, which add up to {sum(counts)}; pairs: {len(pairs)}."
        raise Broken("empty" if len(counts) < here else "padding", promise, seen)
    begin = 0
    for e, n in enumerate(counts):
        mine, begin = pairs[begin : begin + n], begin + n
        real = [pair for pair in mine if pair != len(flat)]
        strange = [pair for pair in real if pair not in want[e]]
        if strange:
            seen = f"Among the rows of expert {e} is pair {strange[0]}, which {_whom(strange[0], flat, here)}."
            raise Broken("mixed", promise, seen)
        lost = [pair for pair in want[e] if pair not in real]
        if lost or len(real) != len(set(real)):
            seen = f"Pair {lost[0]} chose expert {e}, and is not there." if lost else f"Expert {e} has a pair twice."
            raise Broken("lost", promise, seen)
        if n != -(-len(real) // block) * block:
            raise Broken("padding", promise, f"Expert {e} has {len(real)} pairs, in {n} rows; a block is {block}.")


def _whom(pair: int, flat: Tensor, here: int) -> str:
    if not 0 <= pair < len(flat):
        return "does not exist"
    expert = int(flat[pair])
    return f"chose expert {expert}" if 0 <= expert < here else "chose an expert of another rank"


def run_multiply(student: Student, workload: dict[str, Any]) -> None:
    moe, given = backend(student, workload["block"]), problem_of(workload)
    if not hasattr(moe, "multiply"):
        return run_whole(student, workload)
    chosen = Counter((given.ids.flatten() - workload["first"]).tolist())
    counts = [chosen[e] for e in range(workload["here"])]
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(sum(counts), HIDDEN, generator=generator)
    got = moe.multiply(moe.load(given.gate_up, given.down, given.here, "silu"), rows.clone(), counts)
    promise = "Rows of expert e are multiplied with expert e's matrices, and come back in their places."
    if tuple(got.shape) != tuple(rows.shape):
        raise Broken("lost", promise, f"{len(rows)} rows went in, and {list(got.shape)} came out; counts {counts}.")
    begin = 0
    for e, n in enumerate(counts):
        mine, out = rows[begin : begin + n], got[begin : begin + n]
        begin += n
        if n and not torch.allclose(out, _expert(given, e, mine), atol=1e-4):
            used = [i for i in range(workload["here"]) if torch.allclose(out, _expert(given, i, mine), atol=1e-4)]
            what = f"with expert {used[0]}'s" if used else "with something else"
            seen = f"The rows of expert {e} were multiplied {what}; rows by expert: {counts}."
            raise Broken("empty" if used and 0 in counts[:e] else "expert", promise, seen)


def _expert(given: Problem, e: int, rows: Tensor) -> Tensor:
    gate, up = F.linear(rows, given.gate_up[e]).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, given.down[e])


def run_scatter(student: Student, workload: dict[str, Any]) -> None:
    """Rows in which column i is 1 for pair i: what a token gets shows which pairs, with which weights."""
    moe, ids = backend(student, workload["block"]), ids_of(workload)
    if not hasattr(moe, "scatter"):
        return run_whole(student, workload)
    tokens, top_k = ids.shape
    generator = torch.Generator().manual_seed(2)
    scale = torch.rand(tokens, top_k, generator=generator) + 0.5
    flat, n = ids.flatten() - workload["first"], ids.numel()
    ours = [p for e in range(workload["here"]) for p in [*(flat == e).nonzero().flatten().tolist(), n]]
    pairs = torch.tensor(ours)
    rows = torch.zeros(len(ours), n + 1)
    rows[torch.arange(len(ours)), pairs] = 1.0
    out = torch.full((tokens, n + 1), 7.0)
    got = moe.scatter(rows, pairs, scale.clone(), out)
    if not isinstance(got, Tensor) or got.data_ptr() != out.data_ptr():
        raise Broken("stale", "The sums are written into `out`, which is returned.", f"It returned {got!r:.40}.")
    for token in range(tokens):
        line = got[token]
        if float(line[n]) >= 6.5 or bool((line[:n] >= 6.5).any()):
            raise Broken("stale", PROMISE, f"In token {token} is left what stood in `out` before.")
        if float(line[n]) != 0:
            raise Broken("padding", PROMISE, f"Padding was added to token {token}.")
        strangers = [p for p in range(n) if p // top_k != token and abs(float(line[p])) > 1e-5]
        if strangers:
            seen = f"Token {token} got the row of pair {strangers[0]}, which is token {strangers[0] // top_k}'s."
            raise Broken("permutation", PROMISE, seen)
        for pair in range(token * top_k, (token + 1) * top_k):
            want = float(scale[token, pair % top_k]) if pair in ours else 0.0
            if abs(float(line[pair]) - want) > 1e-5:
                raise _misweighed(token, pair, float(line[pair]), want, line, ours, top_k)


def _misweighed(token: int, pair: int, got: float, want: float, line: Tensor, ours: list[int], top_k: int) -> Broken:
    siblings = [p for p in range(token * top_k, (token + 1) * top_k) if p in ours]
    if got == 0:
        there = [p for p in siblings if float(line[p])]
        only = f"; only pair {there[0]}'s is there" if there else ""
        return Broken("overwrites" if there else "lost", PROMISE, f"Token {token} lacks the row of pair {pair}{only}.")
    return Broken("weights", PROMISE, f"Pair {pair} has the weight {want:.3f}; it was weighed with {got:.3f}.")


# ---- the whole ---------------------------------------------------------------------------------------------


def run_whole(student: Student, workload: dict[str, Any]) -> None:
    given = problem_of(workload)
    got, want = given.solve(backend(student, workload["block"])).double(), given.answer()
    for token in range(len(want)):
        if not torch.allclose(got[token], want[token], atol=1e-4):
            raise diagnose(given, got, want, token)


def diagnose(given: Problem, got: Tensor, want: Tensor, token: int) -> Broken:
    """Why a token's row is wrong: of which experts' answers to it is it a sum?"""
    mine, chosen = got[token], given.ids[token].tolist()
    if not bool(torch.isfinite(mine).all()):
        return Broken("stale", PROMISE, f"Token {token} holds what stood in `out` before.")
    others = [t for t in range(len(want)) if t != token and want[t].any() and torch.allclose(mine, want[t], atol=1e-4)]
    if others:
        return Broken("permutation", PROMISE, f"Token {token} got what belongs to token {others[0]}.")
    here = list(given.here)
    answers = torch.stack([_expert(given, e - here[0], given.x[token : token + 1])[0].double() for e in here])
    solved = torch.linalg.lstsq(answers.T, mine.unsqueeze(1), driver="gelsd").solution.flatten()
    left = float((answers.T @ solved - mine).abs().max())
    if left > 1e-3:
        seen = f"Token {token}, which chose experts {chosen}, got something that no weighing of its experts gives."
        return Broken("permutation", PROMISE, seen)
    weights = {e: float(w) for e, w in zip(here, solved, strict=True) if abs(float(w)) > 1e-3}
    strangers = [e for e in weights if e not in chosen]
    if strangers:
        seen = f"Token {token} chose experts {chosen}, and got the answer of expert {strangers[0]}."
        return Broken("expert", PROMISE, seen)
    missing = [e for e in chosen if e in here and e not in weights]
    if missing:
        cause = "overwrites" if weights else "lost"
        return Broken(cause, PROMISE, f"Token {token} chose experts {chosen}, and lacks expert {missing[0]}'s answer.")
    off = max(chosen, key=lambda e: abs(weights.get(e, 0.0) - _scale(given, token, e)))
    seen = f"Token {token} gives expert {off} the weight {_scale(given, token, off):.3f}; it got {weights[off]:.3f}."
    return Broken("weights", PROMISE, seen)


def _scale(given: Problem, token: int, expert: int) -> float:
    at = given.ids[token].tolist().index(expert)
    return float(given.scale[token, at]) if expert in given.here else 0.0


# ---- counts ------------------------------------------------------------------------------------------------


def counts(student: Student) -> str:
    """Which experts are read, and how many rows are multiplied: exact, whatever the structure."""
    said = []
    for tokens, experts in ((1, 64), (8, 64), (200, 8)):
        given = problem(MoeCase(tokens, experts=experts))
        load = Counter(given.ids.flatten().tolist())
        block = 16
        found = count(backend(student, block), given)
        most = sum(-(-n // block) * block for n in load.values())
        promise = f"{tokens} tokens that chose {len(load)} of {experts} experts read those, once."
        if found.experts > len(load) + 1e-9:
            cause = "reads" if len(load) < found.experts <= experts else "again"
            raise Broken(cause, promise, f"Weights of {found.experts:g} experts were read.")
        if found.gemms == 0:
            raise Broken("reads", promise, "No matrix product of torch's was seen that reads the experts' weights.")
        if found.rows > most:
            promise = f"At most {most} rows are multiplied: {given.ids.numel()} pairs in blocks of {block}."
            raise Broken("padding", promise, f"{found.rows} rows were.")
        said.append(f"{found.gemms} GEMMs for {len(load)} of {experts}")
    return ", ".join(said)


def engine(student: Student) -> str:
    """tutor-moe with the student's experts computes what it does with the shipped loop."""
    from minisgl.models.resolve import resolve_model
    from minisgl.testing.paged import PagedModel

    path, ids = resolve_model("tutor-moe"), torch.arange(100, 148)

    def drive(moe: Any = None) -> Tensor:
        model = PagedModel(path, moe=moe, max_len=64, slots=1)
        rows = [model.run([(0, 0, ids[:40])]), *(model.run([(0, i, ids[i : i + 1])]) for i in range(40, 48))]
        return torch.cat([row for (row,) in rows])

    off = float((drive(student.make(device=CPU)) - drive()).abs().max())
    if not off < 1e-3:
        raise Broken("promise", "tutor-moe computes the same with it.", f"Its logits are off by {off:.3g}.")
    return "tutor-moe computes the same with it"


GATES = (
    Gate("sort", "pairs stand by expert, in whole blocks", search(make, run_sort, show=show), part="experts.sort"),
    Gate("multiply", "each expert multiplies its own rows",
         search(make, run_multiply, show=show), part="experts.multiply"),
    Gate("scatter", "each token gets its weighted sum",
         search(make, run_scatter, show=show), part="experts.scatter"),
    Gate("whole", "any routing gives what the definition gives", search(make, run_whole, show=show)),
    Gate("counts", "weights read follow the active experts", counts),
    conformance(lambda: MoeConformance, lambda student: student.make(device=CPU)),
    Gate("engine", "tutor-moe computes the same with it", engine),
    facts(["forward"]),
)  # fmt: skip

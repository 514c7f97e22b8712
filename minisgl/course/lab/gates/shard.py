"""Lab `shard`: each class of the block, then whole models, over ranks that meet in memory, against the shared decoder.

What each rank loads and what the ranks exchange is seen, so a wrong result can be told by how it came about.
"""

from __future__ import annotations

import inspect
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minisgl.config import ConfigError
from minisgl.course.lab.grader.conformance import conformance
from minisgl.course.lab.grader.gate import Broken, Gate, Student
from minisgl.course.lab.grader.model_parts import Bench, Drawn, Shape, make, meet, qwen3, shipped, show, x_of
from minisgl.course.lab.grader.search import search
from minisgl.course.lab.grader.server_gate import facts
from minisgl.layers.weight_shards import WeightShard
from minisgl.models.decoder import Decoder
from minisgl.models.resolve import resolve_model
from minisgl.testing.meeting import Collective
from minisgl.testing.model import ModelConformance
from minisgl.testing.paged import PagedModel

SERVER = ["tp=2"]
LAYER = "model.layers.0."
NEAR = 2e-3
"""Results are about 1 in size; float32 rounds to 1e-6 of that."""


def part(student: Student, name: str) -> Any:
    """The class of the skeleton's, if the student's file has it."""
    assert student.plugin is not None
    return getattr(student.plugin.module, name, None)


def model_class(student: Student) -> Any:
    """The student's; its block must be its own."""
    kind = student.plugin_manager.models()[student.lab.name]
    if inspect.unwrap(getattr(kind, "block", repr)) is Decoder.block:  # the host may have wrapped it, to count
        seen = f"{kind.__name__} has the block of minisgl.models.decoder.Decoder."
        raise Broken("shared", "The block is written from the parallel layers.", seen)
    return kind


# ---- what is the same for every part -------------------------------------------------------------------------


def check_pieces(shape: Shape, number: int, pieces: list[WeightShard], want: dict[str, int]) -> None:
    """What rank ``number`` loads. ``want``: tensor → which dimension is cut (-1: none). Raises `Broken`."""
    promise = "A rank loads the checkpoint's tensors, by name, and of the matrices its part."
    names = {piece.name.removeprefix(LAYER) for piece in pieces}
    strange, missing = sorted(names - want.keys()), sorted(want.keys() - names)
    if strange or missing:
        parts = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"has {', '.join(strange)}"] * bool(strange)
        raise Broken("names", promise, f"It {' and '.join(parts)}.")
    for piece in pieces:
        name = piece.name.removeprefix(LAYER)
        all_of_it = piece.target.numel() == int(np.prod(piece.shape))
        if shape.ranks > 1 and want[name] >= 0 and all_of_it and not _copied(shape, name):
            raise Broken("whole", promise, f"Rank {number} of {shape.ranks} loads all of {name}.")
        _check_heads(shape, number, name, piece)


def _check_heads(shape: Shape, number: int, name: str, piece: WeightShard) -> None:
    """q, k and v are cut by rows at whole heads, and rank r's kv heads are those that its query heads use."""
    letter = name.removeprefix("self_attn.").partition("_")[0]
    if letter not in ("q", "k", "v") or "norm" in name:
        return
    rows, dim = piece.index[0], shape.head_dim
    if rows.start % dim or rows.stop % dim:
        seen = (
            f"Rank {number} of {shape.ranks} has rows {rows.start} to {rows.stop - 1} of {name}; a head is {dim} rows."
        )
        raise Broken("across", "A rank has whole heads.", seen)


def _copied(shape: Shape, name: str) -> bool:
    """One kv head for all ranks is in each of them whole."""
    return shape.kv_heads == 1 and any(f"{letter}_proj" in name for letter in "kv")


def near(a: Any, b: Any) -> bool:
    return bool(torch.isfinite(a).all()) and float((a - b).abs().max()) < NEAR


def far(outs: Sequence[Tensor], want: Tensor) -> str:
    return f"off by {max(float((out - want).abs().max()) for out in outs):.2g}"


def check_spec(shape: Shape, module: Any) -> None:
    """What the pool and the attention backend will believe."""
    spec = getattr(module, "spec", None)
    want = shape.q_heads // shape.ranks, max(1, shape.kv_heads // shape.ranks), shape.head_dim
    if spec is None or (spec.q_heads, spec.kv_heads, spec.head_dim) != want:
        has = "there is none" if spec is None else f"it says {spec.q_heads} and {spec.kv_heads}"
        seen = f"On {shape.ranks} ranks a rank has {want[0]} query and {want[1]} kv heads of {want[2]}; {has}."
        raise Broken("heads", "`self_attn.spec` says what this rank has.", seen)


def refused(shape: Shape, build: Callable[[], Any]) -> Any:
    """What ``build`` makes; a layer that refuses to be cut so is a wrong cut here."""
    try:
        return build()
    except ConfigError as error:
        seen = f"{error} ({shape.q_heads} query and {shape.kv_heads} kv heads, {shape.ranks} ranks.)"
        raise Broken("across", "A rank has whole heads.", seen) from error


# ---- attention and feed-forward -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Half:
    """Half a block: the skeleton's class, where its weights stand, and what one rank alone does wrong at most."""

    kind: str
    name: str
    what: str
    cause: str

    def build(self, kind: Any, shape: Shape, bench: Bench) -> Any:
        first = (0,) if self.name == "self_attn" else ()
        return kind(*first, shape.config, bench.ctx)

    def call(self, module: Any, bench: Bench) -> Tensor:
        more = (bench.cos_sin, bench.where) if self.name == "self_attn" else ()
        out: Tensor = module(x_of(bench.shape), *more)
        return out

    def cut(self, shape: Shape) -> dict[str, int]:
        """Tensor → the dimension along which it is cut, -1 for one that is not."""
        if self.name == "mlp":
            return {f"mlp.{name}_proj.weight": dim for name, dim in (("gate", 0), ("up", 0), ("down", 1))}
        cut = {f"self_attn.{name}_proj.weight": dim for name, dim in (("q", 0), ("k", 0), ("v", 0), ("o", 1))}
        cut |= {f"self_attn.{name}_norm.weight": -1 for name in "qk"}
        if shape.bias:
            cut |= {f"self_attn.{name}_proj.bias": dim for name, dim in (("q", 0), ("k", 0), ("v", 0), ("o", -1))}
        return cut


ATTENTION = Half("Attention", "self_attn", "Attention", "norms")
MLP = Half("MLP", "mlp", "The feed-forward", "different")


def half_gate(half: Half) -> Callable[[Student, dict[str, Any]], None]:
    def run(student: Student, workload: dict[str, Any]) -> None:
        shape, kind = Shape.of(workload), part(student, half.kind)
        if kind is None:
            return run_model(student, workload)

        def on(ranks: int) -> tuple[list[Tensor], list[Collective]]:
            cut = replace(shape, ranks=ranks)

            def work(comm: Any) -> Tensor:
                bench, drawn = Bench(cut, comm), Drawn()
                made = refused(cut, lambda: half.build(kind, cut, bench))
                drawn.load(made, f"{LAYER}{half.name}.")
                check_pieces(cut, comm.rank, drawn.pieces, half.cut(cut))
                if half is ATTENTION:
                    check_spec(cut, made)
                    bench.ready(made.spec)
                return half.call(made, bench)

            return meet(ranks, work)

        def alone(comm: Any) -> Tensor:
            bench = Bench(shape, comm)
            made = getattr(qwen3()(shape.config, bench.ctx).layers[0], half.name)
            Drawn().load(made, f"{LAYER}{half.name}.")
            if half is ATTENTION:
                bench.ready(made.spec)
            return half.call(made, bench)

        (want,), _ = meet(1, alone)
        outs, held = on(shape.ranks)
        wrong = check_half(half, shape, outs, want, held)
        if wrong is None:
            return
        first, _ = on(1)
        if not near(first[0], want):
            seen = f"On one rank, with nothing cut, it is {far(first, want)}."
            raise Broken(half.cause, f"{half.what} computes what Qwen3's does.", seen)
        raise wrong

    return run


def check_half(half: Half, shape: Shape, outs: list[Tensor], want: Tensor, held: list[Collective]) -> Broken | None:
    """Each rank has the result, or the ranks' parts add up to it: the block may sum."""
    kinds = Counter(each.kind for each in held)
    promise = f"{half.what} computes on {shape.ranks} ranks what Qwen3's does on one."
    for rank, out in enumerate(outs):
        if tuple(out.shape) != tuple(want.shape):
            cause = "heads" if half is ATTENTION else "different"
            return Broken(cause, promise, f"Rank {rank} has a result of {list(out.shape)}, not {list(want.shape)}.")
    if shape.ranks == 1:
        return None if near(outs[0], want) else Broken(half.cause, promise, f"It is {far(outs, want)}.")
    other = sorted(set(kinds) - {"all_reduce"})
    if other:
        return Broken(
            "gathers", f"{half.what} exchanges one sum.", f"The ranks did {other[0]} {kinds[other[0]]} times."
        )
    if kinds["all_reduce"] > 1:
        return Broken("reduces", f"{half.what} exchanges one sum.", f"The ranks exchanged {kinds['all_reduce']}.")
    if all(near(out, want) for out in outs) or (not held and near(torch.stack(outs).sum(0), want)):
        return None
    for times in range(2, shape.ranks + 1):
        if near(outs[0], times * want):
            return Broken("scale", promise, f"The result is {times} times what it should be.")
    return Broken("parts", promise, f"It is {far(outs, want)}.")


# ---- the block ------------------------------------------------------------------------------------------------


def run_block(student: Student, workload: dict[str, Any]) -> None:
    shape, kind = Shape.of(workload), part(student, "Block")
    if kind is None:
        return run_model(student, workload)

    def on(ranks: int) -> tuple[list[Tensor], list[Collective]]:
        cut = replace(shape, ranks=ranks)

        def work(comm: Any) -> Tensor:
            bench = Bench(cut, comm)
            made = kind(0, cut.config, bench.ctx)
            Drawn().load(made, LAYER)
            bench.ready(made.self_attn.spec)
            x, residual = made(x_of(cut), None, bench.cos_sin, bench.where)
            if residual is None:
                return x
            return (comm.all_reduce(x) if ranks > 1 else x) + residual  # a sum that is left to the norm behind it

        return meet(ranks, work)

    def alone(comm: Any) -> tuple[Tensor, Tensor]:
        bench = Bench(shape, comm)
        made = qwen3()(shape.config, bench.ctx).layers[0]
        Drawn().load(made, LAYER)
        bench.ready(made.self_attn.spec)
        x = x_of(shape)
        first = made.self_attn(made.input_layernorm(x)[0].clone(), bench.cos_sin, bench.where)
        x, residual = made(x, None, bench.cos_sin, bench.where)
        return x + residual, first

    ((want, first),), _ = meet(1, alone)
    outs, held = on(shape.ranks)
    promise = f"A block computes on {shape.ranks} ranks what Qwen3's does on one."
    if not all(near(out, want) for out in outs):
        once, _ = on(1)
        if not near(once[0], want):
            raise Broken("different", "A block computes what Qwen3's does.", f"On one rank it is {far(once, want)}.")
        raise wrong_block(shape, f"The result is {far(outs, want)}.", want, first, held, promise)
    if shape.ranks > 1:
        check_exchanges(held, 2, 0, shape.tokens * shape.hidden * 4, "A block")


def wrong_block(shape: Shape, off: str, want: Tensor, first: Tensor, held: list[Collective], promise: str) -> Broken:
    """By what the ranks summed first, which should be attention's result (``first``), and second."""
    x, n = x_of(shape), shape.ranks
    sums = [torch.stack(each.parts).sum(0) for each in held if each.kind == "all_reduce"]
    if len(sums) < 2:
        return Broken("unsummed", promise, f"{off} The ranks exchanged {len(sums)} sums.")
    stages = (("first is attention's", first, x), ("second is the feed-forward's", want - x - first, x + first))
    for (what, should, stream), total in zip(stages, sums, strict=False):
        if near(total, should + n * stream):
            seen = f"{off} What was summed {what} result, and {n} times the residual stream."
            return Broken("residual", promise, seen)
    return Broken("parts", promise, off)


def check_exchanges(held: list[Collective], sums: int, gathers: int, nbytes: int, what: str) -> None:
    """So many all-reduces of ``nbytes`` and all-gathers, and nothing else."""
    kinds = Counter(each.kind for each in held)
    promise = f"{what} exchanges {sums} sums of {nbytes} bytes, and nothing else between its layers."
    if kinds["all_gather"] > gathers:
        raise Broken("gathers", promise, f"The ranks gathered {kinds['all_gather'] - gathers} times.")
    moved = sum(each.nbytes for each in held if each.kind == "all_reduce")
    if kinds["all_reduce"] > sums or moved > sums * nbytes:
        raise Broken("reduces", promise, f"They exchanged {kinds['all_reduce']} sums, {moved} bytes a rank.")


# ---- whole models ------------------------------------------------------------------------------------------------


def drive(kind: Any, shape: Shape, comm: Any) -> Tensor:
    """A chunk, and a chunk behind it: logits of each position."""
    options: dict[str, Any] = {"source": Drawn(), "page_size": 4, "max_len": 64, "slots": 1}
    model = PagedModel(shape.config, comm=comm, model=kind, manager=shipped(), **options)
    ids = torch.arange(7, 7 + shape.tokens + 2) % shape.config.vocab_size
    (a,), (b,) = model.run([(0, 0, ids[: shape.tokens])]), model.run([(0, shape.tokens, ids[shape.tokens :])])
    return torch.cat((a, b))


def run_model(student: Student, workload: dict[str, Any]) -> None:
    shape, kind = Shape.of(workload), model_class(student)
    (want,), _ = meet(1, lambda comm: drive(qwen3(), shape, comm))
    for rank, got in enumerate(meet(shape.ranks, lambda comm: drive(kind, shape, comm))[0]):
        if not near(got / 10, want / 10):
            promise = f"The model computes on {shape.ranks} ranks what Qwen3 does on one."
            cause = "different" if shape.ranks == 1 else "parts"
            raise Broken(cause, promise, f"Logits on rank {rank} are {far([got], want)}.")


def counts(student: Student) -> str:
    """tutor on 2 and 4 ranks: two all-reduces a layer, one for the embedding, one gather for the head."""
    path, kind, tokens, said = resolve_model("tutor"), model_class(student), 9, []
    whole = PagedModel(path, manager=shipped(), slots=1, max_len=32).bytes_read
    for ranks in (2, 4):

        def work(comm: Any) -> PagedModel:
            model = PagedModel(path, comm=comm, model=kind, manager=shipped(), slots=1, max_len=32)
            model.run([(0, 0, list(range(tokens)))])
            return model

        models, held = meet(ranks, work)
        config = models[0].config
        sums = 2 * config.num_hidden_layers + 1
        check_exchanges(held, sums, 1, tokens * config.hidden_size * 4, f"tutor on {ranks} ranks")
        most = max(model.bytes_read for model in models)
        if most > 1.2 * whole / min(ranks, config.num_key_value_heads):
            seen = f"One reads {most} of {whole} bytes."
            raise Broken("whole", f"Each of {ranks} ranks reads its part of the checkpoint.", seen)
        moved = sum(each.nbytes for each in held if each.kind == "all_reduce")
        said.append(f"{sums} all-reduces, {moved // 1024} KiB on each of {ranks} ranks")
    return "; ".join(said)


class OnTutor(ModelConformance):
    """The public kit on tutor's weights; the shared decoder is the reference."""

    def checkpoint(self, folder: Path) -> Path:
        return Path(shutil.copytree(resolve_model("tutor"), folder / "tutor"))

    def reference(self, path: Path, ids: Tensor) -> Tensor:
        (logits,) = PagedModel(path, manager=shipped(), slots=1, max_len=64).run([(0, 0, ids)])
        return logits


GATES = (
    Gate("attention", "each rank attends with its own heads",
         search(make, half_gate(ATTENTION), show=show, tries=24), part="shard.attention"),
    Gate("mlp", "the feed-forward is cut in the middle",
         search(make, half_gate(MLP), show=show, tries=24), part="shard.mlp"),
    Gate("block", "the residual stream is added once, and two sums are exchanged",
         search(make, run_block, show=show, tries=24), part="shard.block"),
    Gate("model", "any shape on any number of ranks is Qwen3", search(make, run_model, show=show, tries=16)),
    Gate("counts", "two all-reduces a layer suffice", counts),
    conformance(lambda: OnTutor, model_class, limit=30.0),
    facts(["forward"]),
)  # fmt: skip

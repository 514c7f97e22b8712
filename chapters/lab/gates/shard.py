"""Gates of lab `shard`: each class of the decoder block, then whole models, over ranks that are threads.

The reference is the shared decoder. The gates see which weights each rank loads and which collectives the ranks
exchange, so the cause of a wrong result can be named.
"""

from __future__ import annotations

import inspect
import random
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from minisgl.chapters.lab.grader.conformance import conformance
from minisgl.chapters.lab.grader.gate import Broken, Gate, Stretch, Student, amount
from minisgl.chapters.lab.grader.model_launches import LAYERS, launches_of_a_model
from minisgl.chapters.lab.grader.model_parts import (
    PartRunner,
    RandomWeights,
    Shape,
    make,
    qwen3,
    run_ranks,
    shipped,
    show,
    x_of,
)
from minisgl.chapters.lab.grader.search import search
from minisgl.chapters.lab.grader.server_gate import facts
from minisgl.config import ConfigError
from minisgl.layers.weight_shards import WeightShard
from minisgl.models.decoder import Decoder
from minisgl.models.resolve import resolve_model
from minisgl.testing.meeting import Collective
from minisgl.testing.model import ModelConformance
from minisgl.testing.paged import PagedModel

SERVER = ["tp=2"]
LAYER = "model.layers.0."
NEAR = 2e-3
"""The tolerance of results, which are about 1; float32 rounds them to 1e-6."""


def part(student: Student, name: str) -> Any:
    """Return the class of this name in the student's file, or None."""
    assert student.plugin is not None
    return getattr(student.plugin.module, name, None)


def model_class(student: Student) -> Any:
    """Return the student's model class. Raise `Broken` if its method `block` is the shared decoder's."""
    kind = student.plugin_manager.models()[student.lab.name]
    # The plugin manager may have wrapped the method to count its calls.
    if inspect.unwrap(getattr(kind, "block", repr)) is Decoder.block:
        seen = f"{kind.__name__} inherits the method `block` of minisgl.models.decoder.Decoder."
        raise Broken("shared", "The class has its own block, written from the parallel layers.", seen)
    return kind


# ---- checks of every part ------------------------------------------------------------------------------------


def check_shards(shape: Shape, number: int, shards: list[WeightShard], want: dict[str, int]) -> None:
    """Check the weight shards that rank ``number`` loads. Raise `Broken` for a wrong name or cut.

    ``want`` maps each tensor of the checkpoint to the dimension along which it is cut (-1: not cut).
    """
    promise = "Each rank loads the checkpoint's tensors by their names, and of each matrix its own part."
    names = {shard.name.removeprefix(LAYER) for shard in shards}
    unknown, missing = sorted(names - want.keys()), sorted(want.keys() - names)
    if unknown and not missing and all(name.endswith(".bias") for name in unknown):
        raise Broken("bias", promise, f"The layer has {', '.join(unknown)}.")
    if unknown or missing:
        parts = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"has {', '.join(unknown)}"] * bool(unknown)
        raise Broken("names", promise, f"The layer {' and '.join(parts)}.")
    for shard in shards:
        name = shard.name.removeprefix(LAYER)
        check_size(shape, name, shard)
        complete = shard.target.numel() == int(np.prod(shard.shape))
        if shape.ranks > 1 and want[name] >= 0 and complete and not _copied(shape, name):
            raise Broken("whole", promise, f"Rank {number} of {shape.ranks} loads the complete tensor {name}.")
        _check_heads(shape, number, name, shard)


def check_size(shape: Shape, name: str, shard: WeightShard) -> None:
    """Check that a layer's whole matrix has the model's sizes. Raise `Broken` if it has not."""
    q, kv = shape.q_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    outs = {"q": q, "k": kv, "v": kv, "gate": shape.inner, "up": shape.inner}
    inputs = {"o": q, "down": shape.inner}
    part, _, what = name.rpartition(".")[0].rpartition(".")[2].partition("_")
    if what != "proj" or not name.endswith(".weight"):
        return
    want = (outs.get(part, shape.hidden), inputs.get(part, shape.hidden))
    if shard.shape == want:
        return
    ranks = amount(shape.ranks, "rank")
    seen = f"With {ranks}, the layer of {name} is {list(shard.shape)} in all; the model's is {list(want)}."
    divided = all(mine in (whole, whole // shape.ranks) for mine, whole in zip(shard.shape, want, strict=True))
    promise = "The parallel layers get the sizes of the whole model."
    raise Broken("divided" if divided and shape.ranks > 1 else "sizes", promise, seen)


def _check_heads(shape: Shape, number: int, name: str, shard: WeightShard) -> None:
    """Check that a rank's rows of the q, k and v matrices are those of whole heads."""
    letter = name.removeprefix("self_attn.").partition("_")[0]
    if letter not in ("q", "k", "v") or "norm" in name:
        return
    rows, dim = shard.index[0], shape.head_dim
    if rows.start % dim or rows.stop % dim:
        loads = f"rows {rows.start} to {rows.stop - 1} of {name}"
        seen = f"Rank {number} of {shape.ranks} loads {loads}; a head has {dim} rows."
        raise Broken("across", "Each rank has whole heads.", seen)


def _copied(shape: Shape, name: str) -> bool:
    """Return whether each rank has a complete copy of the tensor: the k and v of a single kv head."""
    return shape.kv_heads == 1 and any(f"{letter}_proj" in name for letter in "kv")


def near(a: Any, b: Any) -> bool:
    """Return whether ``a`` is finite and equals ``b`` within the tolerance."""
    return bool(torch.isfinite(a).all()) and float((a - b).abs().max()) < NEAR


def far(outs: Sequence[Tensor], want: Tensor) -> str:
    """Say how far the worst rank's result is from the right one."""
    return f"off by {max(float((out - want).abs().max()) for out in outs):.2g}"


def check_spec(shape: Shape, module: Any) -> None:
    """Check the heads in the layer's `LayerSpec`, from which the KV pool and the attention backend take their sizes."""
    spec = getattr(module, "spec", None)
    if spec is None:
        seen = "The attention module has no attribute `spec`."
        raise Broken("attribute", "The engine finds the parts of a layer by the names of their attributes.", seen)
    index = shape.layers - 1
    if (spec.index, spec.window) != (index, shape.config.window(index)):
        seen = f"Layer {index} has the window {shape.config.window(index)}; `spec` says layer {spec.index} and window "
        raise Broken(
            "spec", "`self_attn.spec` has the index and the sliding window of its layer.", f"{seen}{spec.window}."
        )
    if abs(spec.scale - shape.head_dim**-0.5) > 1e-6:
        seen = f"Heads have the size {shape.head_dim}; `spec.scale` is {spec.scale:g}."
        raise Broken("spec", "The scale of the scores is head_dim ** -0.5.", seen)
    want = shape.q_heads // shape.ranks, max(1, shape.kv_heads // shape.ranks), shape.head_dim
    if (spec.q_heads, spec.kv_heads, spec.head_dim) != want:
        says = f"`spec` says {spec.q_heads} and {spec.kv_heads}, of size {spec.head_dim}"
        each = f"each has {want[0]} query and {want[1]} kv heads of size {want[2]}"
        seen = f"With {amount(shape.ranks, 'rank')}, {each}; {says}."
        raise Broken("heads", "`self_attn.spec` has the numbers of heads of this rank.", seen)


def build_or_fail(shape: Shape, build: Callable[[], Any]) -> Any:
    """Return what ``build`` builds. Raise `Broken` if a parallel layer refuses its sizes."""
    try:
        return build()
    except ConfigError as error:
        seen = f"{error} ({shape.q_heads} query and {shape.kv_heads} kv heads, {amount(shape.ranks, 'rank')}.)"
        if not any(f"{letter}_proj" in str(error) for letter in "qkv"):  # the model's own sizes can be divided
            raise Broken("divided", "The parallel layers get the sizes of the whole model.", seen) from error
        raise Broken("across", "Each rank has whole heads.", seen) from error


# ---- attention and feed-forward -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Half:
    """Half of a block: attention or feed-forward.

    ``kind`` is the skeleton's class, ``name`` the attribute of the block, ``what`` the half in words, and ``cause`` the
    cause of a wrong result on one rank.
    """

    kind: str
    name: str
    what: str
    cause: str

    def build(self, kind: Any, shape: Shape, runner: PartRunner) -> Any:
        """Build the student's class for one rank."""
        first = (shape.layers - 1,) if self.name == "self_attn" else ()
        return kind(*first, shape.config, runner.ctx)

    def call(self, module: Any, runner: PartRunner) -> Tensor:
        """Run the half on the workload's prompt."""
        more = (runner.cos_sin, runner.out_cache_loc) if self.name == "self_attn" else ()
        out: Tensor = module(runner.x, *more)
        return out

    def cut(self, shape: Shape) -> dict[str, int]:
        """Return each tensor of the half and the dimension along which it is cut (-1: not cut)."""
        if self.name == "mlp":
            return {f"mlp.{name}_proj.weight": dim for name, dim in (("gate", 0), ("up", 0), ("down", 1))}
        cut = {f"self_attn.{name}_proj.weight": dim for name, dim in (("q", 0), ("k", 0), ("v", 0), ("o", 1))}
        cut |= {f"self_attn.{name}_norm.weight": -1 for name in "qk"}
        if shape.bias:
            cut |= {f"self_attn.{name}_proj.bias": dim for name, dim in (("q", 0), ("k", 0), ("v", 0), ("o", -1))}
        return cut


OWN_WEIGHTS = "Several models in a process have weights of their own."
ATTENTION = Half("Attention", "self_attn", "Attention", "norms")
MLP = Half("MLP", "mlp", "The feed-forward", "different")


def half_gate(half: Half) -> Callable[[Student, dict[str, Any]], None]:
    """Return the check of one half: its weights, its result and its collectives. Without the class: of the model."""

    def run(student: Student, workload: dict[str, Any]) -> None:
        shape, kind = Shape.of(workload), part(student, half.kind)
        if kind is None:
            return run_model(student, workload)
        if half is MLP and shape.tokens > 1000:
            shape = replace(shape, tokens=4 * shape.tokens)

        def on(ranks: int, steps: int = 1, model: int = 0) -> tuple[list[Tensor], list[Collective]]:
            cut = replace(shape, ranks=ranks)

            def work(comm: Any) -> Tensor:
                runner, weights = PartRunner(cut, comm), RandomWeights(model)
                made = build_or_fail(cut, lambda: half.build(kind, cut, runner))
                weights.load(made, f"{LAYER}{half.name}.")
                check_shards(cut, comm.rank, weights.shards, half.cut(cut))
                if half is ATTENTION:
                    check_spec(cut, made)
                    runner.prepare(made.spec)
                out = run_steps(half, made, runner, steps)
                if half is ATTENTION and steps == 1:
                    check_stored(runner, made.spec.index)
                return out

            return run_ranks(ranks, work)

        def alone(comm: Any, steps: int = 1, model: int = 0) -> Tensor:
            runner = PartRunner(shape, comm)
            made = getattr(qwen3()(shape.config, runner.ctx).layers[shape.layers - 1], half.name)
            RandomWeights(model).load(made, f"{LAYER}{half.name}.")
            if half is ATTENTION:
                runner.prepare(made.spec)
            return run_steps(half, made, runner, steps)

        (want,), _ = run_ranks(1, alone)
        outs, collectives = on(shape.ranks)
        wrong = check_half(half, shape, outs, want, collectives)
        if wrong is None and shape.ranks == 1 and shape.tokens < 60:
            if half is ATTENTION:
                check_dtypes(student, shape, kind)
            check_bfloat16(half.what, shape, lambda cut, runner: half.build(kind, cut, runner), half)
        if wrong is None and shape.tokens < 60:
            own = f"Each step of {half.what.lower()} is computed from its own inputs."
            for steps, model, when, promise in (
                (2, 0, "In the second step, with new numbers in the same tensors", own),
                (1, 1, "In a second model of the same shape, with other weights", OWN_WEIGHTS),
            ):
                (want,), _ = run_ranks(1, partial(alone, steps=steps, model=model))
                outs, _ = on(shape.ranks, steps, model)
                if not all(near(out, want) for out in outs) and not near(torch.stack(outs).sum(0), want):
                    raise Broken("kept", promise, f"{when}, the result is {far(outs, want)}.")
        if wrong is None:
            return
        first, _ = on(1)
        if not near(first[0], want):
            seen = f"On one rank, with no tensor cut, the result is {far(first, want)}."
            promise = f"{half.what} computes the same as Qwen3's."
            if half is MLP:
                (mistakes,), _ = run_ranks(1, lambda comm: mlp_mistakes(shape, comm))
                for cause, text, other in mistakes:
                    if near(first[0], other) and not near(other, want):
                        raise Broken(cause, promise, f"{seen} {text}")
            raise Broken(half.cause, promise, seen)
        raise wrong

    return run


def mlp_mistakes(shape: Shape, comm: Any) -> Mistakes:
    """Return the results of Qwen3's feed-forward on one rank with other gates."""
    runner = PartRunner(shape, comm)
    made = qwen3()(shape.config, runner.ctx).layers[shape.layers - 1].mlp
    RandomWeights().load(made, f"{LAYER}mlp.")
    gate, up = made.gate_up_proj(runner.x).chunk(2, dim=-1)
    silu = torch.nn.functional.silu
    return [
        ("exchanged", "It is down(silu(up) · gate).", made.down_proj(silu(up) * gate)),
        ("gate", "It is down(gate · up), without silu.", made.down_proj(gate * up)),
        ("gate", "It is down(silu(gate)), without up.", made.down_proj(silu(gate))),
        ("gate", "It is down(silu(gate · up)).", made.down_proj(silu(gate * up))),
    ]


def check_stored(runner: PartRunner, index: int) -> None:
    """Check that attention has stored keys and values in its own layer of the pool, and in no other."""
    pool = runner.ctx.pool
    assert pool is not None
    written = [layer for layer in range(runner.shape.layers) if bool(pool.layer(layer)[0].any())]
    if written != [index]:
        where = f"of layer {', '.join(map(str, written))}" if written else "of no layer"
        seen = f"The layer has the index {index}. It stored keys in the KV {where}."
        raise Broken("stored", "A layer stores its keys and values in its own part of the KV pool.", seen)


def check_dtypes(student: Student, shape: Shape, kind: Any) -> None:
    """Run attention of a bfloat16 model on one rank, and check the dtypes of the tensors that it passes on."""
    bfloat16 = torch.bfloat16
    promise = "In a bfloat16 model, `cos_sin` stays float32, and `out` has the dtype and device of the queries."

    def work(comm: Any) -> Tensor:
        runner = PartRunner(shape, comm, bfloat16)
        made = ATTENTION.build(kind, shape, runner)
        RandomWeights().load(made, f"{LAYER}{ATTENTION.name}.")
        runner.prepare(made.spec)
        backend = runner.ctx.attention
        attend, store = backend.forward, backend.norm_rope_store

        def noted_attend(spec: Any, q: Tensor, out: Tensor) -> Tensor:
            if (out.shape, out.dtype, out.device) != (q.shape, q.dtype, q.device):
                seen = f"`ctx.attention.forward` got q {list(q.shape)} in {q.dtype} and out {list(out.shape)} in "
                raise Broken("dtypes", promise, f"{seen}{out.dtype} on {out.device}.")
            if out.data_ptr() == q.data_ptr():
                seen = "`ctx.attention.forward` got one tensor as q and as `out`."
                raise Broken("shares", "Your code allocates `out`.", seen)
            return attend(spec, q, out)

        def noted_store(spec: Any, qkv: Tensor, norm: Any, cos_sin: Tensor, out_cache_loc: Tensor) -> Tensor:
            if cos_sin.dtype != torch.float32 or not torch.equal(cos_sin, runner.cos_sin):
                seen = f"`norm_rope_store` got other cosines and sines than `forward`, in {cos_sin.dtype}."
                raise Broken("dtypes", promise, seen)
            return store(spec, qkv, norm, cos_sin, out_cache_loc)

        noted = patch.multiple(backend, forward=noted_attend, norm_rope_store=noted_store)
        elsewhere = torch.device("meta")  # a tensor without `device=` is on another device than the queries
        given = runner.cos_sin.clone(), runner.out_cache_loc.clone()
        with noted, elsewhere:
            out = ATTENTION.call(made, runner)
        for name, before, after in zip(("cos_sin", "out_cache_loc"), given, (runner.cos_sin, runner.out_cache_loc),
                                       strict=True):  # fmt: skip
            if not torch.equal(before, after):
                seen = f"After `forward` of attention, the tensor `{name}` had other numbers than before."
                raise Broken("changes", "All layers of a step get the same `cos_sin` and `out_cache_loc`.", seen)
        return out

    run_ranks(1, work)


def check_bfloat16(what: str, shape: Shape, build: Callable[[Shape, PartRunner], Any], half: Half | None) -> None:
    """Compare a part of a bfloat16 model with Qwen3's on one rank. ``half`` None: the part is a whole block."""
    prefix = LAYER if half is None else f"{LAYER}{half.name}."

    def run(made: Any, runner: PartRunner) -> Tensor:
        RandomWeights().load(made, prefix)
        if half is not MLP:
            runner.prepare((made if half else made.self_attn).spec)
        if half is not None:
            return half.call(made, runner)
        x, residual = pair_of(made(runner.x.clone(), None, runner.cos_sin, runner.out_cache_loc))
        out: Tensor = x if residual is None else x + residual
        return out

    def mine(comm: Any) -> Tensor:
        runner = PartRunner(shape, comm, torch.bfloat16)
        return run(build(shape, runner), runner)

    def right(comm: Any) -> Tensor:
        runner = PartRunner(shape, comm, torch.bfloat16)
        layer = qwen3()(shape.config, runner.ctx).layers[shape.layers - 1]
        return run(layer if half is None else getattr(layer, half.name), runner)

    ((out,), _), ((want,), _) = run_ranks(1, mine), run_ranks(1, right)
    promise = f"{what} of a bfloat16 model computes in bfloat16, with the weights that were loaded."
    if out.dtype != torch.bfloat16:
        raise Broken("dtypes", promise, f"The result is in {out.dtype}.")
    off = (out.float() - want.float()).abs().max()
    if not bool(off < 0.05 + 0.05 * want.float().abs().max()):
        seen = f"In bfloat16, the result is off by {float(off):.2g}. In float32, it is right."
        raise Broken("copied" if bool(off.isnan()) else "dtypes", promise, seen)


def run_steps(half: Half, module: Any, runner: PartRunner, steps: int) -> Tensor:
    """Return the result of the last of ``steps`` steps. All steps get the same tensors with other contents."""
    out = half.call(module, runner)
    before = out.clone()
    for _ in range(1, steps):
        runner.next_step()
        new = half.call(module, runner)
        if not torch.equal(out, before):
            seen = f"{half.what} of a second step changed the result of the first."
            raise Broken("kept", "Each step has a result of its own.", seen)
        out, before = new, new.clone()
    return out


def check_half(
    half: Half, shape: Shape, outs: list[Tensor], want: Tensor, collectives: list[Collective]
) -> Broken | None:
    """Return the finding for a wrong result, or None.

    Right is: each rank has the complete result, or, without a collective, the ranks' results add up to it, because the
    block may do the sum.
    """
    kinds = Counter(each.kind for each in collectives)
    promise = f"{half.what} computes the same on {amount(shape.ranks, 'rank')} as Qwen3's on one rank."
    for rank, out in enumerate(outs):
        if tuple(out.shape) != tuple(want.shape):
            cause = "heads" if half is ATTENTION else "different"
            seen = f"The result on rank {rank} has the shape {list(out.shape)}, not {list(want.shape)}."
            return Broken(cause, promise, seen)
    if shape.ranks == 1:
        return None if near(outs[0], want) else Broken(half.cause, promise, f"The result is {far(outs, want)}.")
    other = sorted(set(kinds) - {"all_reduce"})
    one_sum = f"{half.what} needs one all-reduce and no other collective."
    if other:
        return Broken("gathers", one_sum, f"The ranks called {other[0]} {kinds[other[0]]} times.")
    if kinds["all_reduce"] > 1:
        return Broken("reduces", one_sum, f"The ranks called all_reduce {kinds['all_reduce']} times.")
    if all(near(out, want) for out in outs) or (not collectives and near(torch.stack(outs).sum(0), want)):
        return None
    for times in range(2, shape.ranks + 1):
        if near(outs[0], times * want):
            return Broken("scale", promise, f"The result is {times} times the right one.")
    return Broken("parts", promise, f"The result is {far(outs, want)}.")


# ---- the block ------------------------------------------------------------------------------------------------


def run_block(student: Student, workload: dict[str, Any]) -> None:
    """Grade a whole block: its result and its collectives. Without the class `Block`, grade the model."""
    shape, kind = Shape.of(workload), part(student, "Block")
    if kind is None:
        return run_model(student, workload)

    firsts: dict[int, Tensor] = {}  # the first value of each rank's pair, if the second is not None

    def on(ranks: int) -> tuple[list[Tensor], list[Collective]]:
        cut = replace(shape, ranks=ranks)

        def work(comm: Any) -> Tensor:
            runner = PartRunner(cut, comm)
            made = kind(cut.layers - 1, cut.config, runner.ctx)
            lacks = [name for name in ("self_attn", "mlp") if not hasattr(made, name)]
            if lacks:
                seen = f"The block has no attribute `{lacks[0]}`."
                promise = "The engine finds the parts of a layer by the names of their attributes."
                raise Broken("attribute", promise, seen)
            RandomWeights().load(made, LAYER)
            runner.prepare(made.self_attn.spec)
            x, residual = pair_of(made(x_of(cut), None, runner.cos_sin, runner.out_cache_loc))
            if residual is not None:
                firsts[comm.rank] = x.clone()
            # With a residual, the block left its last sum over the ranks to the norm of the next block.
            out: Tensor = x if residual is None else (comm.all_reduce(x) if ranks > 1 else x) + residual
            return out

        return run_ranks(ranks, work)

    def alone(comm: Any) -> tuple[Tensor, Tensor]:
        runner = PartRunner(shape, comm)
        made = qwen3()(shape.config, runner.ctx).layers[shape.layers - 1]
        RandomWeights().load(made, LAYER)
        runner.prepare(made.self_attn.spec)
        x = x_of(shape)
        first = made.self_attn(made.input_layernorm(x)[0].clone(), runner.cos_sin, runner.out_cache_loc)
        x, residual = made(x, None, runner.cos_sin, runner.out_cache_loc)
        return x + residual, first

    ((want, first),), _ = run_ranks(1, alone)
    outs, collectives = on(shape.ranks)
    promise = f"A block computes the same on {amount(shape.ranks, 'rank')} as Qwen3's on one rank."
    if not all(near(out, want) for out in outs):
        once, _ = on(1)
        if firsts and near(firsts[0], want):
            seen = "The first value of the pair is the right result. The second is a tensor, which the next norm adds."
            raise Broken("pair", "A block returns the pair (x, None).", seen)
        if not near(once[0], want):
            seen = f"On one rank, with no tensor cut, the result is {far(once, want)}."
            (mistakes,), _ = run_ranks(1, lambda comm: block_mistakes(shape, comm))
            for cause, text, wrong in mistakes:
                if near(once[0], wrong):
                    raise Broken(cause, "A block computes the same as Qwen3's.", f"{seen} {text}")
            raise Broken("different", "A block computes the same as Qwen3's.", seen)
        raise wrong_block(shape, f"The result is {far(outs, want)}.", want, first, collectives, promise)
    if shape.ranks > 1:
        check_exchanges(collectives, 2, 0, shape.tokens * shape.hidden * 4, "A block")
    elif shape.tokens < 60:
        check_bfloat16("A block", shape, lambda cut, runner: kind(cut.layers - 1, cut.config, runner.ctx), None)


Mistakes = list[tuple[str, str, Tensor]]
"""Causes, sentences, and the results of a block with these mistakes."""


def pair_of(result: Any) -> tuple[Tensor, Tensor | None]:
    """Return the result of a block. Raise `Broken` if it is not a pair."""
    if isinstance(result, tuple) and len(result) == 2:
        return result
    seen = f"`forward` of the block returned a {type(result).__name__}."
    raise Broken("pair", "A block returns the pair (x, None).", seen)


def block_mistakes(shape: Shape, comm: Any) -> Mistakes:
    """Return the results of Qwen3's block on one rank with one norm or one addition left out."""
    runner = PartRunner(shape, comm)
    made = qwen3()(shape.config, runner.ctx).layers[0]
    RandomWeights().load(made, LAYER)
    runner.prepare(made.self_attn.spec)
    x = x_of(shape)

    def norm(which: Any, x: Tensor) -> Tensor:
        out: Tensor = which(x.clone(), None)[0]
        return out.clone()

    def attend(x: Tensor) -> Tensor:
        out: Tensor = made.self_attn(x.clone(), runner.cos_sin, runner.out_cache_loc)
        return out.clone()

    def feed(x: Tensor) -> Tensor:
        out: Tensor = made.mlp(x.clone())
        return out.clone()

    second = made.post_attention_layernorm
    attended = attend(norm(made.input_layernorm, x))
    after, bare = x + attended, x + attend(x)
    normed, last = norm(made.input_layernorm, x) + attended, norm(second, after)
    return [
        ("norms", "The norm before attention is missing.", bare + feed(norm(second, bare))),
        ("norms", "The norm before the feed-forward network is missing.", after + feed(after)),
        ("stream", "The block's input is not added to attention's result.", attended + feed(norm(second, attended))),
        ("stream", "The result lacks the residual stream.", feed(norm(second, after))),
        ("stream", "Attention's result is added to the output of the norm.", normed + feed(norm(second, normed))),
        ("stream", "The feed-forward network's result is added to the output of the norm.", last + feed(last)),
        ("stream", "The end adds the block's input instead of the stream.", x + feed(norm(second, after))),
    ]


def wrong_block(
    shape: Shape, off: str, want: Tensor, first: Tensor, collectives: list[Collective], promise: str
) -> Broken:
    """Return the finding for a wrong block, from the two sums that the ranks exchanged.

    The first sum should be attention's result, ``first``. The second should be the feed-forward's.
    """
    x, n = x_of(shape), shape.ranks
    sums = [torch.stack(each.parts).sum(0) for each in collectives if each.kind == "all_reduce"]
    if len(sums) < 2:
        return Broken("unsummed", promise, f"{off} The ranks called all_reduce {len(sums)} times; a block needs 2.")
    stages = (("first", first, x), ("second", want - x - first, x + first))
    for (what, should, stream), total in zip(stages, sums, strict=False):
        if near(total, should + n * stream):
            half = "attention" if what == "first" else "the feed-forward"
            seen = f"{off} The {what} all-reduce summed the result of {half} and {n} times the residual stream."
            return Broken("residual", promise, seen)
    return Broken("parts", promise, off)


def check_exchanges(collectives: list[Collective], sums: int, gathers: int, nbytes: int, what: str) -> None:
    """Raise `Broken` for more than ``sums`` all-reduces of ``nbytes`` each, more than ``gathers``, or anything else."""
    kinds = Counter(each.kind for each in collectives)
    promise = f"{what} needs {sums} all-reduces of {nbytes} bytes, and no other collective between its layers."
    if kinds["all_gather"] > gathers:
        raise Broken("gathers", promise, f"The ranks called all_gather {kinds['all_gather'] - gathers} times.")
    for other in kinds.keys() - {"all_reduce", "all_gather"}:
        raise Broken("reduces", promise, f"The ranks also called {other}.")
    moved = sum(each.nbytes for each in collectives if each.kind == "all_reduce")
    if kinds["all_reduce"] > sums or moved > sums * nbytes:
        seen = f"The ranks called all_reduce {kinds['all_reduce']} times, with {moved} bytes on each rank."
        raise Broken("reduces", promise, seen)


# ---- whole models ------------------------------------------------------------------------------------------------


def drive(kind: Any, shape: Shape, comm: Any, model: int = 0) -> Tensor:
    """Run a model on a prompt in chunks and return the logits of each position.

    As in the engine, each step has its tokens, positions and KV locations in the same tensors.
    """
    options: dict[str, Any] = {"source": RandomWeights(model), "page_size": 4, "max_running_requests": 1}
    options["max_seq_len"] = 64 if shape.tokens < 60 else shape.tokens + 8
    paged = PagedModel(shape.config, comm=comm, model=kind, manager=shipped(), **options)
    forward, same = paged.model.forward, torch.zeros(3, shape.tokens + 2, dtype=torch.long)

    def forward_same(*given: Tensor) -> Tensor:
        inputs = [row[: len(x)] for row, x in zip(same, given, strict=True)]
        for row, x in zip(inputs, given, strict=True):
            row.copy_(x)
        return forward(*inputs)

    lengths = [shape.tokens, shape.tokens, 1, 1, 2] if shape.tokens < 28 else [shape.tokens, 2]
    ids = (torch.arange(7, 7 + sum(lengths)) % shape.config.vocab_size).split(lengths)
    starts = np.cumsum([0, *lengths]).tolist()
    with patch.object(paged.model, "forward", forward_same):
        return torch.cat([paged.run([(0, start, part)])[0] for start, part in zip(starts, ids, strict=False)])


def make_model(rng: random.Random, size: int) -> dict[str, Any]:
    """Return a workload of `make`, but never one of eight ranks: whole models of eight threads take too long."""
    return make(rng, size + (size == 7))


def run_model(student: Student, workload: dict[str, Any]) -> None:
    """Compare the logits of the student's model over the ranks with those of Qwen3 on one rank."""
    shape, kind = Shape.of(workload), model_class(student)
    for model in range(2 if shape.tokens < 60 else 1):

        def on(ranks: int, kind: Any, model: int = model) -> list[Tensor]:
            return run_ranks(ranks, lambda comm: drive(kind, shape, comm, model))[0]

        want = on(1, qwen3())[0]
        for rank, got in enumerate(on(shape.ranks, kind)):
            if near(got / 10, want / 10):
                continue
            promise = f"The model computes the same logits on {amount(shape.ranks, 'rank')} as Qwen3 on one rank."
            n, seen = shape.tokens, f"The logits on rank {rank} are {far([got], want)}."
            if model:
                text = "In a second model of the same shape, with other weights, t"
                raise Broken("kept", OWN_WEIGHTS, text + seen[1:])
            if near(got[:n] / 10, want[:n] / 10):
                text = "Those of the first step are right. Later steps have other numbers in the same tensors."
                raise Broken("kept", "Each step is computed from its own inputs.", f"{seen} {text}")
            raise Broken("different" if shape.ranks == 1 else "parts", promise, seen)


def counts(student: Student) -> str:
    """Count the collectives of `tutor`, and the bytes of weights that each rank loads, on 2 and on 4 ranks.

    Allowed are two all-reduces in each layer, one all-reduce for the embedding, and one all-gather for the head.
    """
    path, kind, tokens, notes = resolve_model("tutor"), model_class(student), 9, []
    whole = PagedModel(path, manager=shipped(), max_running_requests=1, max_seq_len=32).bytes_read
    for ranks in (2, 4):

        def work(comm: Any) -> PagedModel:
            model = PagedModel(path, comm=comm, model=kind, manager=shipped(), max_running_requests=1, max_seq_len=32)
            model.run([(0, 0, list(range(tokens)))])
            return model

        models, collectives = run_ranks(ranks, work)
        config = models[0].config
        sums = 2 * config.num_hidden_layers + 1
        check_exchanges(collectives, sums, 1, tokens * config.hidden_size * 4, f"tutor on {ranks} ranks")
        most = max(model.bytes_read for model in models)
        if most > 1.2 * whole / min(ranks, config.num_key_value_heads):
            seen = f"A rank loads {most} of {whole} bytes."
            raise Broken("whole", f"Each of {ranks} ranks loads only its part of the checkpoint.", seen)
        moved = sum(each.nbytes for each in collectives if each.kind == "all_reduce")
        notes.append(f"{sums} all-reduces, {moved // 1024} KiB on each of {ranks} ranks")
    return "; ".join(notes)


class OnTutor(ModelConformance):
    """The public kit on the weights of `tutor`, with the shared decoder as the reference."""

    def checkpoint(self, folder: Path) -> Path:
        """Return a copy of the checkpoint of `tutor`, whose folder can be written even if the original's can't."""
        copy = Path(shutil.copytree(resolve_model("tutor"), folder / "tutor"))
        copy.chmod(0o755)
        return copy

    def reference(self, path: Path, ids: Tensor) -> Tensor:
        """Return the logits of the shipped model."""
        (logits,) = PagedModel(path, manager=shipped(), max_running_requests=1, max_seq_len=64).run([(0, 0, ids)])
        return logits


GATES = (
    Gate("attention", "each rank computes attention with its own heads",
         search(make, half_gate(ATTENTION), show=show, tries=24, at_least=7), part="shard.attention"),
    Gate("mlp", "the feed-forward network is cut along its inner dimension",
         search(make, half_gate(MLP), show=show, tries=24, at_least=7), part="shard.mlp"),
    Gate("block", "the residual stream is added once, and the ranks exchange two sums",
         search(make, run_block, show=show, tries=24, at_least=7), part="shard.block"),
    Gate("model", "a model of any shape gives Qwen3's results on any number of ranks",
         search(make_model, run_model, show=show, tries=16, at_least=7)),
    Gate("counts", "each layer needs two all-reduces and no other collective", counts),
    conformance(lambda: OnTutor, model_class, limit=30.0),
    facts(["forward"]),
)  # fmt: skip


MOST_LAUNCHES = 50


def measure_stretch(student: Student) -> tuple[str, bool]:
    """Count the launches of a step of the student's model over two ranks."""
    launches = launches_of_a_model(model_class(student))
    return f"{launches} launches", launches <= MOST_LAUNCHES


STRETCH = Stretch(
    f"Between GPUs, a communicator can sum, add and normalise in one launch. With such a communicator, a model of "
    f"{LAYERS} layers over two ranks takes 66 launches for a step with `Qwen3Plain`. Take at most {MOST_LAUNCHES}.",
    measure_stretch,
)

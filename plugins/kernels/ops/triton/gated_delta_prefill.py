"""Linear attention with the gated delta rule in Triton: the prompts of a step, of any lengths, in three launches.

Each prompt is cut into chunks of 64 tokens. Two launches compute all chunks at once: the convolution, and what a chunk
does to a state whatever the state is. The third one carries the state of each row through its chunks, one after
another. Yang et al., Parallelizing Linear Transformers with the Delta Rule, 2024.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.plugins.kernels.ops.triton.gated_delta import Heads, Weights

__all__ = ["Plan", "plan", "prefill", "serves"]

CHUNK = 64


class Plan(NamedTuple):
    """How the prompts of a step are computed, the same in all layers. Tokens are counted from the first prompt's on."""

    chunks: Tensor  # [4, chunks] int32: first token, number of tokens, row, and the slot to save the state in, or -1
    rows: Tensor  # [4, rows] int32: first token, 1 unless it begins at position 0, first chunk, chunk after the last
    # Entries of the last inputs of the convolution: each row's own one, and one for each saved state.
    owners: Tensor  # [entries] int64: the row
    kept: Tensor  # [entries, 1, 1] bool: whether the row has earlier inputs
    sources: Tensor  # [entries, kernel - 1] int64: the tokens
    inside: Tensor  # [entries, 1, kernel - 1] bool: whether the token is one of this step
    earlier: Tensor  # [entries, 1, kernel - 1] int64: if not, its place among the earlier inputs
    slots: Tensor  # [entries] int64: where the entry is stored


def plan(parts: Sequence[Sequence[tuple[int, int, int]]], begins: Sequence[bool], slots: Tensor, kernel: int) -> Plan:
    """Return the plan of rows with the slots ``slots`` [rows] int32.

    Each row of ``parts`` has the parts of its prompt: (first token, token after the last, slot to save the state after
    it, or -1). ``begins`` says of each row whether it begins at position 0.
    """
    chunks: list[tuple[int, int, int, int]] = []
    rows: list[tuple[int, int, int, int]] = []
    entries: list[tuple[int, int, int, int]] = []
    for row, own in enumerate(parts):
        first_chunk, first, end = len(chunks), own[0][0], own[-1][1]
        for start, stop, save in own:
            for token in range(start, stop, CHUNK):
                last = token + CHUNK >= stop
                chunks.append((token, min(CHUNK, stop - token), row, save if last else -1))
            if save >= 0:
                entries.append((row, first, stop, save))
        rows.append((first, int(not begins[row]), first_chunk, len(chunks)))
        entries.append((row, first, end, -1))
    sizes = 4 * len(chunks), 4 * len(rows), 4 * len(entries)
    flat = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=slots.is_cuda)
    columns = (np.array(table, np.int32).T.ravel() for table in (chunks, rows, entries))
    flat.numpy()[:] = np.concatenate(list(columns))
    on_device = [part.view(4, -1) for part in flat.to(slots.device, non_blocking=True).split(sizes)]
    owners, firsts, ends, saves = on_device[2].long()
    sources = ends[:, None] + torch.arange(1 - kernel, 0, device=slots.device)
    inside = sources >= firsts[:, None]
    earlier = (sources - firsts[:, None] + kernel - 1).clamp(0, kernel - 2)
    own_slots = slots.long().index_select(0, owners)
    return Plan(
        on_device[0],
        on_device[1],
        owners,
        on_device[1][1].index_select(0, owners).bool()[:, None, None],
        sources.clamp(min=0),
        inside[:, None],
        earlier[:, None],
        torch.where(saves < 0, own_slots, saves),
    )


@triton.jit(do_not_specialize=["num_chunks", "num_rows"], do_not_specialize_on_alignment=["chunks", "rows", "slots"])
def convolve_kernel(
    mixed, state, weight, out, chunks, rows, slots, num_chunks, num_rows, stride_mixed, query_scale,
    K_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, FEATURES: tl.constexpr, KERNEL: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Convolve the features of one head in one chunk. Writes silu of the result; of queries and keys, with length 1."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    start, count = tl.load(chunks + chunk), tl.load(chunks + num_chunks + chunk)
    row = tl.load(chunks + 2 * num_chunks + chunk)
    first, kept = tl.load(rows + row), tl.load(rows + num_rows + row) != 0
    slot = tl.load(slots + row).to(tl.int64)
    is_key = head < 2 * K_HEADS
    feature = tl.where(is_key, head * DK, 2 * K_HEADS * DK + (head - 2 * K_HEADS) * DV) + tl.arange(0, BLOCK)
    real_feature = tl.arange(0, BLOCK) < tl.where(is_key, DK, DV)
    i = tl.arange(0, CHUNK)
    token = start + i
    real = (i < count)[:, None] & real_feature[None, :]
    total = tl.zeros([CHUNK, BLOCK], tl.float32)
    for tap in tl.static_range(KERNEL):
        source = token - (KERNEL - 1 - tap)
        inside = source >= first
        now = tl.load(
            mixed + source.to(tl.int64)[:, None] * stride_mixed + feature[None, :],
            mask=real & inside[:, None],
            other=0.0,
        )
        place = source - first + KERNEL - 1
        earlier = tl.load(
            state + (slot * FEATURES + feature[None, :]) * (KERNEL - 1) + place[:, None],
            mask=real & (kept & (source < first))[:, None],
            other=0.0,
        )
        by = tl.load(weight + feature * KERNEL + tap, mask=real_feature, other=0.0).to(tl.float32)
        total += (now.to(tl.float32) + earlier.to(tl.float32)) * by[None, :]
    value = total * tl.sigmoid(total)
    if is_key:
        value = value * tl.rsqrt(tl.sum(value * value, 1) + 1e-6)[:, None]
    if head < K_HEADS:
        value = value * query_scale
    at = out + token.to(tl.int64)[:, None] * FEATURES + feature[None, :]
    tl.store(at, value.to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["num_chunks"], do_not_specialize_on_alignment=["chunks"])
def chunk_kernel(
    features, beta, decay, A_log, dt_bias, chunks, num_chunks, keys_out, values_out, scores_out, decays_out,
    stride_beta, stride_decay,
    K_HEADS: tl.constexpr, RATIO: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, FEATURES: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Solve the triangular system of one chunk and one value head, for any state: see `delta_rule` in torch.

    With the state S before the chunk, the corrections are ``values_out`` - ``keys_out`` · S, and the chunk's own part
    of what is read is ``scores_out`` · corrections. ``decays_out`` are the logarithms of the decay up to each token.
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    heads: tl.constexpr = K_HEADS * RATIO
    start, count = tl.load(chunks + chunk), tl.load(chunks + num_chunks + chunk)
    i, k, v = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    token, real = (start + i).to(tl.int64), i < count
    own = features + token[:, None] * FEATURES
    real_k, real_v = real[:, None] & (k < DK)[None, :], real[:, None] & (v < DV)[None, :]
    query = tl.load(own + head // RATIO * DK + k[None, :], mask=real_k, other=0.0)
    key = tl.load(own + (K_HEADS + head // RATIO) * DK + k[None, :], mask=real_k, other=0.0)
    value = tl.load(own + 2 * K_HEADS * DK + head * DV + v[None, :], mask=real_v, other=0.0)
    strength = tl.sigmoid(tl.load(beta + token * stride_beta + head, mask=real, other=0.0).to(tl.float32))
    step = tl.load(decay + token * stride_decay + head, mask=real, other=0.0).to(tl.float32)
    step += tl.load(dt_bias + head).to(tl.float32)
    step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))  # softplus
    step = tl.where(real, -tl.exp(tl.load(A_log + head).to(tl.float32)) * step, 0.0)
    total = tl.cumsum(step, 0)
    before = i[:, None] >= i[None, :]
    past = tl.where(before, tl.exp(tl.where(before, total[:, None] - total[None, :], 0.0)), 0.0)
    system = tl.dot(key, tl.trans(key), input_precision="ieee") * past * strength[:, None]
    # The inverse of the unit triangular matrix, row by row.
    inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    for row in range(1, count):
        is_row = i == row
        factors = tl.sum(tl.where(is_row[:, None] & (i < row)[None, :], system, 0.0), 0)
        found = tl.where(is_row, 1.0, 0.0) - tl.sum(factors[:, None] * inverse, 0)
        inverse = tl.where(is_row[:, None], found[None, :], inverse)
    dtype = values_out.dtype.element_ty
    inverse = tl.where(real[None, :], inverse * strength[None, :], 0.0)
    wide_key = inverse * tl.exp(total)[None, :]
    at = (chunk.to(tl.int64) * heads + head) * CHUNK + i
    solved = tl.dot(inverse.to(dtype), value, input_precision="ieee").to(dtype)
    tl.store(values_out + at[:, None] * DV + v[None, :], solved, mask=(v < DV)[None, :])
    solved_keys = tl.dot(wide_key.to(dtype), key, input_precision="ieee").to(dtype)
    tl.store(keys_out + at[:, None] * DK + k[None, :], solved_keys, mask=(k < DK)[None, :])
    scores = (tl.dot(query, tl.trans(key), input_precision="ieee") * past).to(dtype)
    tl.store(scores_out + at[:, None] * CHUNK + i[None, :], scores)
    tl.store(decays_out + at, total)


@triton.jit(do_not_specialize=["num_chunks", "num_rows"], do_not_specialize_on_alignment=["chunks", "rows", "slots"])
def carry_kernel(
    features, state, keys, values, scores, decays, out, chunks, rows, slots, num_chunks, num_rows,
    K_HEADS: tl.constexpr, RATIO: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, FEATURES: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Carry BLOCK_V columns of the state of one value head through the chunks of one row, and read it after each token.

    The state is stored in the row's slot at the end, and in other slots after the chunks that say so.
    """
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads: tl.constexpr = K_HEADS * RATIO
    kept = tl.load(rows + num_rows + row) != 0
    i, k, v = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K), block * BLOCK_V + tl.arange(0, BLOCK_V)
    real_state = (k < DK)[:, None] & (v < DV)[None, :]
    place = k[:, None] * DV + v[None, :]
    own = state + (tl.load(slots + row).to(tl.int64) * heads + head) * DK * DV + place
    content = tl.load(own, mask=real_state & kept, other=0.0)
    for chunk in range(tl.load(rows + 2 * num_rows + row), tl.load(rows + 3 * num_rows + row)):
        start, count = tl.load(chunks + chunk), tl.load(chunks + num_chunks + chunk)
        token, real = (start + i).to(tl.int64), i < count
        real_k = real[:, None] & (k < DK)[None, :]
        at = (chunk * heads + head) * CHUNK + i.to(tl.int64)
        solved = tl.load(keys + at[:, None] * DK + k[None, :], mask=(k < DK)[None, :], other=0.0)
        target = tl.load(values + at[:, None] * DV + v[None, :], mask=(v < DV)[None, :], other=0.0)
        query = tl.load(features + token[:, None] * FEATURES + head // RATIO * DK + k[None, :], mask=real_k, other=0.0)
        key_at = features + token[:, None] * FEATURES + (K_HEADS + head // RATIO) * DK + k[None, :]
        key = tl.load(key_at, mask=real_k, other=0.0)
        score = tl.load(scores + at[:, None] * CHUNK + i[None, :])
        total = tl.load(decays + at)
        end = tl.sum(tl.where(i == CHUNK - 1, total, 0.0), 0)
        rounded = content.to(key.dtype)
        correction = target.to(tl.float32) - tl.dot(solved, rounded, input_precision="ieee")
        read = tl.dot(query, rounded, input_precision="ieee") * tl.exp(total)[:, None]
        read = tl.dot(score, correction.to(key.dtype), read, input_precision="ieee")
        out_at = out + token[:, None] * (heads * DV) + head * DV + v[None, :]
        tl.store(out_at, read.to(out.dtype.element_ty), mask=real[:, None] & (v < DV)[None, :])
        late = (key.to(tl.float32) * tl.exp(end - total)[:, None]).to(key.dtype)
        content = tl.dot(tl.trans(late), correction.to(key.dtype), content * tl.exp(end), input_precision="ieee")
        save = tl.load(chunks + 3 * num_chunks + chunk)
        if save >= 0:
            tl.store(state + (save.to(tl.int64) * heads + head) * DK * DV + place, content, mask=real_state)
    tl.store(own, content, mask=real_state)


def serves(heads: Heads) -> bool:
    """Return whether the tiles of a chunk fit in a multiprocessor."""
    return heads.dk <= 128 and heads.dv <= 128


def prefill(
    mixed: Tensor, beta: Tensor, decay: Tensor, states: list[Tensor], slots: Tensor, weights: Weights, heads: Heads,
    planned: Plan,
) -> Tensor:  # fmt: skip
    """Absorb the prompts of a step. Return what is read after each token, [tokens, v_heads · dv].

    The arguments are those of `minisgl.plugins.kernels.ops.triton.gated_delta.decode`, for all tokens of the prompts.
    """
    (inputs, matrices), kernel = states, weights.conv.shape[-1]
    num_chunks, num_rows = planned.chunks.shape[1], planned.rows.shape[1]
    block_k, block_v = (max(16, triton.next_power_of_2(size)) for size in (heads.dk, heads.dv))
    features = mixed.new_empty((len(mixed), heads.features))
    sizes = {"K_HEADS": heads.k_heads, "DK": heads.dk, "DV": heads.dv, "FEATURES": heads.features, "CHUNK": CHUNK}
    convolve_kernel[(num_chunks, 2 * heads.k_heads + heads.v_heads)](
        mixed, inputs, weights.conv, features, planned.chunks, planned.rows, slots, num_chunks, num_rows,
        mixed.stride(0), heads.dk**-0.5, **sizes, KERNEL=kernel, BLOCK=max(block_k, block_v), num_warps=4,
    )  # fmt: skip
    earlier = inputs.index_select(0, slots.long().index_select(0, planned.owners)).masked_fill(~planned.kept, 0.0)
    earlier = earlier.gather(-1, planned.earlier.expand(-1, heads.features, -1))
    now = mixed[planned.sources].transpose(1, 2)
    inputs[planned.slots] = torch.where(planned.inside, now, earlier)
    keys, values, scores = (
        mixed.new_empty((num_chunks, heads.v_heads, CHUNK, size)) for size in (heads.dk, heads.dv, CHUNK)
    )
    decays = mixed.new_empty((num_chunks, heads.v_heads, CHUNK), dtype=torch.float32)
    chunk_kernel[(num_chunks, heads.v_heads)](
        features, beta, decay, weights.A_log, weights.dt_bias, planned.chunks, num_chunks,
        keys, values, scores, decays, beta.stride(0), decay.stride(0),
        **sizes, RATIO=heads.ratio, BLOCK_K=block_k, BLOCK_V=block_v, num_warps=4,
    )  # fmt: skip
    read = mixed.new_empty((len(mixed), heads.v_heads * heads.dv))
    columns = min(block_v, 32)
    carry_kernel[(triton.cdiv(heads.dv, columns), heads.v_heads, num_rows)](
        features, matrices, keys, values, scores, decays, read, planned.chunks, planned.rows, slots,
        num_chunks, num_rows, **sizes, RATIO=heads.ratio, BLOCK_K=block_k, BLOCK_V=columns,
        num_warps=4, num_stages=2 if mixed.itemsize == 2 else 1,
    )  # fmt: skip
    return read

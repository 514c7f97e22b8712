"""Tests of `InputBuilder` against a plain loop over rows and tokens, of static buffers, and of shared prefixes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minisgl.attention import GraphKey
from minisgl.core import I32, PENDING, EngineSpec, Step
from minisgl.engine.inputs import InputBuilder, SamplePlan
from minisgl.plugins.graph.replaying.inputs import GraphInputBuffers
from minisgl.plugins.kernels.attention import shared_prefix
from minisgl.plugins.kernels.attention.shared_prefix import SharedPrefixInputs

CPU = torch.device("cpu")


def i32(*values: int) -> I32:
    return np.array(values, np.int32)


def random_step(rng: np.random.Generator, spec: EngineSpec, decode: int, chunks: int, step_id: int = 0) -> Step:
    """Return a random step with ``decode`` decode rows, ``chunks`` prefill chunks, and all page-table writes."""
    rows = decode + chunks
    req_pool_indices = rng.permutation(spec.max_running_requests)[:rows].astype(np.int32)
    counts = np.concatenate([np.ones(decode, np.int32), rng.integers(1, 9, chunks).astype(np.int32)])
    starts = rng.integers(0, spec.max_seq_len - 9, rows).astype(np.int32)
    pages = rng.permutation(spec.num_pages).astype(np.int32)
    writes: list[tuple[int, int, int]] = []
    for req_pool_idx, end in zip(req_pool_indices, starts + counts):
        for column in range(-(-int(end) // spec.page_size)):
            writes.append((req_pool_idx, column, pages[len(writes) % len(pages)]))
    table = np.array(writes, np.int32).T
    tokens = rng.integers(0, spec.vocab_size, counts.sum()).astype(np.int32)
    tokens[:decode] = np.where(rng.random(decode) < 0.5, PENDING, tokens[:decode])
    sampled = np.concatenate([np.ones(decode, np.int32), rng.integers(0, 2, chunks).astype(np.int32)])
    updates = (table[0], table[1], table[2])
    return Step(step_id, req_pool_indices, starts, counts, sampled, decode, 0, tokens, updates)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("decode", "chunks"), [(1, 0), (6, 0), (0, 1), (0, 5), (4, 3)])
def test_build_equals_plain_loop(page_size: int, decode: int, chunks: int) -> None:
    """`InputBuilder.build` and `sampling_inputs` give the same values as a loop over rows and tokens."""
    spec = EngineSpec(page_size, 400, 12, 60, 99)
    rng = np.random.default_rng(page_size + decode * 10 + chunks)
    builder = InputBuilder(spec, CPU)
    for step_id in range(3):
        step = random_step(rng, spec, decode, chunks, step_id)
        builder.update_page_table(step)
        tokens, batch = builder.build(step)

        table = {(int(r), int(c)): int(p) for r, c, p in zip(*step.page_table_updates)}
        expected: list[list[int]] = []
        index = 0
        for req_pool_idx, start, count in zip(
            step.req_pool_indices.tolist(), step.num_computed_tokens.tolist(), step.num_scheduled_tokens.tolist()
        ):
            for position in range(start, start + count):
                location = table[req_pool_idx, position // page_size] * page_size + position % page_size
                expected.append([int(step.input_ids[index]), position, location, req_pool_idx])
                index += 1
        assert tokens.packed[:4].T.tolist() == expected
        assert tokens.pending == bool((step.input_ids == PENDING).any())
        assert batch.num_decode == decode
        assert batch.req_pool_indices.tolist() == step.req_pool_indices.tolist()
        assert (
            batch.seq_lens.tolist()
            == batch.seq_lens_cpu.tolist()
            == (step.num_computed_tokens + step.num_scheduled_tokens).tolist()
        )
        cu_seqlens_q = [0, *np.cumsum(step.num_scheduled_tokens).tolist()]
        assert batch.cu_seqlens_q.tolist() == batch.cu_seqlens_q_cpu.tolist() == cu_seqlens_q
        for (req_pool_idx, column), page in table.items():
            assert int(batch.page_table[req_pool_idx, column]) == page

        group = np.flatnonzero(step.sample).astype(np.int32)[:1] * 0
        sampling = builder.sampling_inputs(step, SamplePlan(1, {1: group}), batch)
        rows = np.flatnonzero(step.sample)
        last = (
            np.arange(len(step.input_ids)) if sampling.logits_indices is None else np.asarray(sampling.logits_indices)
        )
        assert last.tolist() == [cu_seqlens_q[r + 1] - 1 for r in rows]
        assert sampling.req_pool_indices.tolist() == step.req_pool_indices[rows].tolist()
        assert sampling.positions.tolist() == (step.num_computed_tokens + step.num_scheduled_tokens)[rows].tolist()
        assert sampling.groups[1].tolist() == group.tolist()


def test_page_table_updates_in_order() -> None:
    """Of several writes to one page-table entry, the last one takes effect; the scratch row is never written."""
    builder = InputBuilder(EngineSpec(4, 10, 3, 32, 9), CPU)
    updates = (i32(1, 1, 2, 1), i32(0, 3, 0, 0), i32(5, 6, 7, 8))
    builder.update_page_table(Step(0, i32(1), i32(0), i32(1), i32(1), 1, 0, i32(3), updates))
    assert builder.page_table[1].tolist() == [8, 10, 10, 6, 10, 10, 10, 10]  # 10: the scratch page
    assert builder.page_table[2, 0] == 7
    assert (builder.page_table[3] == 10).all()  # the scratch row


def test_graph_buffers_fill() -> None:
    """`GraphInputBuffers.fill` writes into the same memory, and pads with the scratch row and the scratch page."""
    spec = EngineSpec(4, 10, 6, 32, 9)
    builder = InputBuilder(spec, CPU)
    buffers = GraphInputBuffers(GraphKey(4), spec, builder.page_table, CPU)
    address = buffers.tokens.packed.data_ptr()
    for rows in (i32(2, 5, 1), i32(3)):
        n = len(rows)
        updates = (rows, np.zeros(n, np.int32), np.arange(n, dtype=np.int32))
        ones = np.ones(n, np.int32)
        step = Step(0, rows, np.full(n, 2, np.int32), ones, ones, n, 0, rows, updates)
        builder.update_page_table(step)
        batch = buffers.fill(builder.token_rows(step))
        assert buffers.tokens.packed.data_ptr() == address
        assert batch.graph_key == GraphKey(4)
        assert batch.num_decode == 4
        padding = 4 - n
        assert batch.req_pool_indices.tolist() == [*rows.tolist(), *[spec.max_running_requests] * padding]
        assert batch.seq_lens.tolist() == batch.seq_lens_cpu.tolist() == [3] * n + [1] * padding
        scratch = spec.num_pages * spec.page_size
        assert buffers.tokens.packed[2].tolist() == [page * 4 + 2 for page in range(n)] + [scratch] * padding
        assert batch.cu_seqlens_q.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("common", "starts", "found"),
    [
        ([3, 3, 3], [50, 50, 50], 12),  # three pages of four tokens
        ([3, 2, 3], [50, 50, 50], 8),  # row 1 shares only two pages
        ([3, 3, 3], [50, 50, 9], 8),  # the token that a row computes in this step is not shared
        ([0, 0, 0], [50, 50, 50], 0),
        ([1, 1, 1], [50, 50, 50], 0),  # too short to be worth a separate pass
        ([12, 12, 12], [49, 50, 51], 48),
        ([9], [50], 0),  # one row
    ],
)
def test_find_shared_prefix(common: list[int], starts: list[int], found: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`find_shared_prefix` finds ``found`` tokens if the first ``common[i]`` pages of row i are those of row 0."""
    monkeypatch.setattr(shared_prefix, "MIN_SAVED_TOKENS", 16)
    spec = EngineSpec(4, 400, 8, 60, 99)
    builder, rows, columns = SharedPrefixInputs(spec, CPU), len(common), 15
    builder.shared_prefix_len = torch.zeros(1, dtype=torch.int32)
    req_pool_indices = np.arange(rows, dtype=np.int32) + 2
    pages = np.arange(rows * columns, dtype=np.int32).reshape(rows, columns)
    for row, count in enumerate(common):
        pages[row, :count] = pages[0, :count]
    updates = (np.repeat(req_pool_indices, columns), np.tile(np.arange(columns, dtype=np.int32), rows), pages.ravel())
    ones, pending = np.ones(rows, np.int32), np.full(rows, PENDING, np.int32)
    step = Step(0, req_pool_indices, i32(*starts), ones, ones, rows, 0, pending, updates)
    builder.update_page_table(step)
    assert builder.find_shared_prefix(step) == (found > 0)
    batch = builder.build(step)[1]
    assert (batch.shared_prefix_len is not None) == (found > 0)
    if batch.shared_prefix_len is not None:
        assert batch.shared_prefix_len.tolist() == [found]

"""The work between two rounds of a step that verifies drafts several times: compare, advance, draft again.

In each round, a row computes a token and the drafts after it, and samples after each of them. Then the sampled tokens
are compared with the drafts, and the row goes on after the last token that counts, with new drafts. All of it is done
on the device, so the host does not wait between the rounds. Drafts are copied from an earlier place in the row's own
tokens (prompt lookup decoding; Saxena, 2023). On a GPU, `minisgl.plugins.kernels.ops.triton.rounds` does it in one
launch.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["GROUPS", "advance", "advance_torch", "next_drafts"]

GROUPS = (4, 2)
"""Numbers of last tokens that are looked up in the earlier tokens of a row, the first one first."""


def advance(tokens: Tensor, packed: Tensor, history: Tensor, page_table: Tensor, page_size: int) -> Tensor:
    """Compare the sampled tokens with the drafts, and write the inputs of the next round. Return the accepted lengths.

    - ``tokens`` int64 [rows, w]: the token that was sampled after each token of the round.
    - ``packed`` int32 [5, rows · w or more]: the inputs of the round, as `InputBuilder.token_rows` describes them. They
      are replaced by the inputs of the next round.
    - ``history`` int32 [request-pool rows, positions]: the tokens of each request up to the first token of its row in
      this round. The sampled tokens are added.
    - ``page_table`` int32 [request-pool rows, columns]; it must have the pages of the next round.

    Returns int32 [rows]: for each row, 1 + the number of leading drafts that equal the token sampled before them.
    """
    if tokens.is_cuda:
        from minisgl.plugins.kernels.ops.triton import rounds as triton

        return triton.advance(tokens, packed, history, page_table, page_size)
    return advance_torch(tokens, packed, history, page_table, page_size)


def advance_torch(tokens: Tensor, packed: Tensor, history: Tensor, page_table: Tensor, page_size: int) -> Tensor:
    """Compute `advance` in torch: the reference."""
    rows, width = tokens.shape
    ids, positions, locations, req_pool_indices, seq_lens = packed[:, : rows * width].unflatten(1, (rows, width))
    offsets = torch.arange(width, dtype=torch.int32, device=packed.device)
    length = 1 + (tokens[:, :-1] == ids[:, 1:]).cumprod(1).sum(1)
    req = req_pool_indices[:, 0].long()
    last_column = history.shape[1] - 1
    history[req[:, None], (positions + 1).long().clamp(max=last_column)] = tokens.int()
    first = positions[:, :1] + length[:, None].int()
    ids[:, :1] = tokens.gather(1, length[:, None] - 1).int()
    ids[:, 1:] = next_drafts(history, req, first[:, 0] + 1, width - 1)
    positions.copy_(first + offsets)
    columns = torch.div(positions, page_size, rounding_mode="floor").clamp(max=page_table.shape[1] - 1)
    locations.copy_(page_table[req[:, None], columns.long()] * page_size + positions % page_size)
    seq_lens.copy_(positions + 1)
    accepted: Tensor = length.int()
    return accepted


def next_drafts(history: Tensor, rows: Tensor, lengths: Tensor, count: int) -> Tensor:
    """Return guesses for the next ``count`` tokens of the given rows of ``history``, int32 [rows, count].

    Row i has ``lengths[i]`` tokens. Its last tokens are looked up in its earlier ones: four, and if they occurred
    nowhere before, two. The guesses are the tokens that followed the latest occurrence. They go on with themselves if
    they reach the end. Where nothing is found, they are the row's last token.
    """
    drafts = torch.empty((len(rows), count), dtype=torch.int32, device=history.device)
    for i, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        ids = history[row, :length]
        after = length - 1
        for size in GROUPS:
            if length > size:
                found = (ids[:-1].unfold(0, size, 1) == ids[-size:]).all(1).nonzero()
                if len(found):
                    after = int(found[-1]) + size
                    break
        drafts[i] = ids[after + torch.arange(count, device=history.device) % (length - after)]
    return drafts

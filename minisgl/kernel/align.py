"""Sorts (token, choice) pairs by expert into blocks of one expert each: the rows of a grouped matrix product.

A block that two experts shared would need two weight matrices, so each expert's last block is padded. Here is the plain
torch version; on a GPU it is two launches, and neither version waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.kernel.blocks import max_blocks


def align(ids: Tensor, first: int, experts: int, block: int) -> tuple[Tensor, Tensor]:
    """ids [tokens, top_k] int32, experts' global numbers; experts ``first`` to ``first + experts`` are here.

    Returns int32 ``pairs`` [blocks · block], numbers of pairs (token · top_k + choice) in their order within each
    expert, padded with tokens · top_k; and ``owner`` [blocks], each block's expert counted from ``first``, -1 for a
    block that nobody needs. Pairs of experts that are elsewhere are left out.
    """
    blocks = max_blocks(ids.numel(), experts, block)
    if ids.is_cuda:
        from minisgl.kernel.triton import align as triton

        return triton.align(ids, first, experts, block)
    flat, device = ids.flatten().long() - first, ids.device
    flat = torch.where((flat < 0) | (flat >= experts), experts, flat)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=device).index_add_(0, flat, torch.ones_like(flat))
    padded = (counts + (block - 1)) // block * block
    padded[experts] = 0
    ends = padded.cumsum(0)
    order = flat.argsort(stable=True)
    rank = torch.arange(len(flat), device=device) - (counts.cumsum(0) - counts)[flat[order]]
    # Pairs of experts elsewhere come last; they go to one place behind the end.
    place = torch.where(flat[order] < experts, (ends - padded)[flat[order]] + rank, blocks * block)
    pairs = torch.full((blocks * block + 1,), len(flat), dtype=torch.int32, device=device)
    pairs.index_copy_(0, place, order.int())
    begins = torch.arange(blocks, device=device) * block
    owner = torch.searchsorted(ends[:experts], begins, right=True)
    return pairs[:-1], torch.where(owner < experts, owner, -1).int()

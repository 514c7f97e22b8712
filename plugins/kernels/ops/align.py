"""Sorting of (token, choice) pairs by expert into blocks that each belong to one expert.

Each block is a tile of rows of a grouped matrix product. A block with pairs of two experts would need two weight
matrices, so each expert's last block is padded. This module has the torch reference; on a GPU the sort is two or
three Triton launches. Neither version makes the host wait for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.plugins.kernels.ops.blocks import max_blocks


def align(ids: Tensor, first: int, experts: int, block: int) -> tuple[Tensor, Tensor]:
    """Sort the pairs of ``ids`` by expert into blocks of ``block`` pairs.

    ids [tokens, top_k] int32 holds global expert numbers. This rank has the experts ``first`` up to, but not including,
    ``first + experts``; pairs that chose an expert of another rank are left out.

    Returns two int32 tensors. ``pairs`` [blocks · block] holds pair numbers (token · top_k + choice), grouped by
    expert, ascending within each expert; padding entries hold the number tokens · top_k. ``owner`` [blocks] holds each
    block's expert, counted from ``first``, or -1 for an unused block.
    """
    blocks = max_blocks(ids.numel(), experts, block)
    if ids.is_cuda:
        from minisgl.plugins.kernels.ops.triton import align as triton

        return triton.align(ids, first, experts, block)
    flat, device = ids.flatten().long() - first, ids.device
    flat = torch.where((flat < 0) | (flat >= experts), experts, flat)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=device).index_add_(0, flat, torch.ones_like(flat))
    padded = (counts + (block - 1)) // block * block
    padded[experts] = 0
    ends = padded.cumsum(0)
    order = flat.argsort(stable=True)
    rank = torch.arange(len(flat), device=device) - (counts.cumsum(0) - counts)[flat[order]]
    # Pairs of other ranks' experts sort last; they are all written to one extra element past the end.
    place = torch.where(flat[order] < experts, (ends - padded)[flat[order]] + rank, blocks * block)
    pairs = torch.full((blocks * block + 1,), len(flat), dtype=torch.int32, device=device)
    pairs.index_copy_(0, place, order.int())
    begins = torch.arange(blocks, device=device) * block
    owner = torch.searchsorted(ends[:experts], begins, right=True)
    return pairs[:-1], torch.where(owner < experts, owner, -1).int()

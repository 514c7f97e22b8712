"""Attention that computes all decode rows of a step together, gathered without padding and padded afterwards."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from minisgl.attention import AttnNeeds
from minisgl.hooks import hookimpl


@dataclass
class Mine:
    """Attention over pages, for all decode rows at once."""

    def build(self):
        return MyAttention()


class Group(NamedTuple):
    """Rows that compute the same number of positions."""

    first: int  # first query token
    end: int
    kv_locations: torch.Tensor  # [sum of the lengths]
    padded: torch.Tensor  # [rows, longest]: which of these locations; padding repeats the row's last position
    key: torch.Tensor  # [rows, 1, longest]: the position of each key, behind all queries for padding
    query: torch.Tensor  # [rows, queries, 1]: the position of each query


class MyAttention:
    def needs(self):
        return AttnNeeds()

    def bind(self, pool, layers, keys):
        self.pool = pool

    def plan(self, batch):
        decode, n = batch.num_decode, len(batch.seq_lens_cpu)
        ranges = [(0, decode)] * bool(decode) + [(r, r + 1) for r in range(decode, n)]
        self.groups = [self.group(batch, *rows) for rows in ranges]

    def group(self, batch, a, b):
        lengths, (first, end) = batch.seq_lens_cpu[a:b].astype(np.int64), batch.cu_seqlens_q_cpu[[a, b]].tolist()
        starts, queries = np.cumsum(lengths) - lengths, (end - first) // (b - a)
        row, position = np.repeat(np.arange(a, b), lengths), np.arange(lengths.sum()) - np.repeat(starts, lengths)
        size, column = self.pool.page_size, np.arange(lengths.max())
        padded = starts[:, None] + np.minimum(column, lengths[:, None] - 1)
        key = np.where(column < lengths[:, None], column, 2**40)
        query = lengths[:, None] - queries + np.arange(queries)
        pages = batch.page_table[batch.req_pool_indices[torch.from_numpy(row)], torch.from_numpy(position // size)]
        kv_locations = pages.long() * size + torch.from_numpy(position % size)
        arrays = (torch.from_numpy(each) for each in (padded, key[:, None], query[:, :, None]))
        return Group(first, end, kv_locations, *arrays)

    def forward(self, layer, q, out):
        keys, values = (each.flatten(0, 1) for each in self.pool.layer(layer.index))
        for group in self.groups:
            k, v = (each[group.kv_locations].float()[group.padded] for each in (keys, values))
            rows = q[group.first : group.end].float()
            rows = rows.view(len(group.query), -1, layer.kv_heads, layer.q_heads // layer.kv_heads, layer.head_dim)
            scores = torch.einsum("rqhgd,rkhd->rhgqk", rows, k) * layer.scale
            if layer.soft_cap:
                scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
            hidden = group.key > group.query
            if layer.window >= 0:
                hidden |= group.key <= group.query - layer.window
            weights = scores.masked_fill(hidden[:, None, None], float("-inf")).softmax(dim=-1)
            got = torch.einsum("rhgqk,rkhd->rqhgd", weights, v)
            out[group.first : group.end] = got.reshape(group.end - group.first, layer.q_heads, layer.head_dim)
        return out


@hookimpl
def minisgl_configs():
    yield "attention", "mine", Mine

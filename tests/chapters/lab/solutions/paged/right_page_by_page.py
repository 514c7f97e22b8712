"""This attention backend does not gather pages: it computes an online softmax page by page, as FlashAttention does."""

from dataclasses import dataclass

import torch

from minisgl import hookimpl
from minisgl.attention import AttnNeeds


@dataclass
class Mine:
    """Online softmax over pages."""

    def build(self):
        return Streaming()


class Streaming:
    def needs(self):
        return AttnNeeds()

    def bind(self, pool, layers, keys):
        self.pool = pool

    def plan(self, batch):
        self.batch = batch

    def forward(self, layer, q, out):
        batch, size = self.batch, self.pool.page_size
        keys, values = self.pool.layer(layer.index)
        for r, length in enumerate(batch.seq_lens_cpu):
            a, b = batch.cu_seqlens_q_cpu[r : r + 2]
            mine = q[a:b].float().unflatten(1, (layer.kv_heads, -1)) * layer.scale
            at = torch.arange(length - (b - a), length, device=q.device)[:, None]
            top = torch.full(mine.shape[:-1], float("-inf"), device=q.device)
            total, summed = torch.zeros_like(top), torch.zeros_like(mine)
            for column in range(-(-int(length) // size)):
                page = batch.page_table[batch.req_pool_indices[r], column]
                n = min(size, int(length) - column * size)
                k, v = keys[page][:n].float(), values[page][:n].float()
                scores = torch.einsum("qhgd,khd->qhgk", mine, k)
                if layer.soft_cap:
                    scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
                position = column * size + torch.arange(n, device=q.device)
                hidden = position > at
                if layer.window >= 0:
                    hidden |= position <= at - layer.window
                scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
                higher = torch.maximum(top, scores.amax(-1))
                safe = higher.masked_fill(higher.isinf(), 0.0)
                weights = torch.exp(scores - safe[..., None])
                old = torch.exp(top - safe)
                total = total * old + weights.sum(-1)
                summed = summed * old[..., None] + torch.einsum("qhgk,khd->qhgd", weights, v)
                top = higher
            out[a:b] = (summed / total[..., None]).flatten(1, 2).to(q.dtype)
        return out


@hookimpl
def minisgl_configs():
    yield "attention", "mine", Mine

# causes: finite
# gate: attend
"""Masked scores become -10000, which is more than a score of large queries and keys."""

import torch


class MyAttention:
    def attend_row(self, layer, q, k, v):
        group = layer.q_heads // layer.kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * layer.scale
        if layer.soft_cap:
            scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
        mask = self.attention_mask(len(q), len(k), layer.window, q.device)
        weights = scores.masked_fill(~mask, -10000.0).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, v.float()).to(q.dtype)

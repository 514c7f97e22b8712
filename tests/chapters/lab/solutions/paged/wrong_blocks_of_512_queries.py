# causes: blocks
# gate: attend
"""Long chunks are computed in blocks of 512 queries, each as if it were the row's last positions."""

import torch


class MyAttention:
    def attend_row(self, layer, q, k, v):
        if len(q) > 512:
            return torch.cat([self.attend_row(layer, part, k, v) for part in q.split(512)])
        group = layer.q_heads // layer.kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * layer.scale
        if layer.soft_cap:
            scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
        mask = self.attention_mask(len(q), len(k), layer.window, q.device)
        weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, v.float()).to(q.dtype)

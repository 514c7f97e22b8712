# causes: digits
# gate: attend
"""An online softmax whose running sums have the dtype of the queries: in bfloat16 they stop growing."""

import torch


class MyAttention:
    def attend_row(self, layer, q, k, v):
        group = layer.q_heads // layer.kv_heads
        k, v = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
        mask = self.attention_mask(len(q), len(k), layer.window, q.device)
        top = torch.full((layer.q_heads, len(q), 1), float("-inf"), device=q.device)
        queries, keys, values = q.float().transpose(0, 1) * layer.scale, k.permute(1, 2, 0), v.transpose(0, 1)
        total, acc = torch.zeros_like(top, dtype=q.dtype), q.transpose(0, 1) * 0
        for first in range(0, len(k), 64):
            part = slice(first, first + 64)
            scores = queries @ keys[:, :, part]
            if layer.soft_cap:
                scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
            scores = scores.masked_fill(~mask[:, part], float("-inf"))
            new = torch.maximum(top, scores.amax(-1, keepdim=True))
            base = torch.where(new == float("-inf"), 0.0, new)
            weights, fix = (scores - base).exp(), (top - base).exp()
            total = (total * fix + weights.sum(-1, keepdim=True)).to(q.dtype)
            acc = (acc * fix + weights @ values[:, part]).to(q.dtype)
            top = new
        return (acc / total).transpose(0, 1)

# causes: digits
"""Computes in whatever the queries are in, as PyTorch does by itself: right in float32, and in bfloat16 scores have
eight bits."""


class MyAttention:
    def attend(self, layer, q, k, v):
        group = layer.q_heads // layer.kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * layer.scale
        if layer.soft_cap:
            scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
        seen = self.seen(len(q), len(k), layer.window, q.device)
        weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, v)

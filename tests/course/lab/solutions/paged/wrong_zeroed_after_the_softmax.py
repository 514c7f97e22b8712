# causes: zeroed
"""Weights of what is not seen are set to zero, after the softmax has shared them out."""


class MyAttention:
    def attend(self, layer, q, k, v):
        group = layer.q_heads // layer.kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * layer.scale
        weights = scores.softmax(dim=-1) * self.seen(len(q), len(k), layer.window, q.device)
        return torch.einsum("hqk,khd->qhd", weights, v.float()).to(q.dtype)

# causes: groups
# gate: attend
"""This attention backend uses `repeat` instead of `repeat_interleave`, so query heads read the wrong KV heads."""


class MyAttention:
    def attend_row(self, layer, q, k, v):
        group = layer.q_heads // layer.kv_heads
        k, v = k.repeat(1, group, 1), v.repeat(1, group, 1)
        scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * layer.scale
        if layer.soft_cap:
            scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
        mask = self.attention_mask(len(q), len(k), layer.window, q.device)
        weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, v.float()).to(q.dtype)

# causes: changes
# gate: attend
"""This attention backend scales the caller's queries in place. The layer may still need them."""


class MyAttention:
    def attend_row(self, layer, q, k, v):
        group = layer.q_heads // layer.kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        q.mul_(layer.scale)
        scores = torch.einsum("qhd,khd->hqk", q.float(), k.float())
        if layer.soft_cap:
            scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
        mask = self.attention_mask(len(q), len(k), layer.window, q.device)
        weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, v.float()).to(q.dtype)

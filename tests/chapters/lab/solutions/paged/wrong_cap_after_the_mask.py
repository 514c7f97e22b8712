# causes: cap
# gate: attend
"""This attention backend masks before the soft cap, so masked scores become -cap and masked positions get weight."""


class MyAttention:
    def attend_row(self, layer, q, k, v):
        group = layer.q_heads // layer.kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * layer.scale
        scores = scores.masked_fill(~self.attention_mask(len(q), len(k), layer.window, q.device), float("-inf"))
        if layer.soft_cap:
            scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
        return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), v.float()).to(q.dtype)

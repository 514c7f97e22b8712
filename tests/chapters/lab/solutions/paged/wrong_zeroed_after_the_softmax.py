# causes: zeroed
# gate: attend
"""This attention backend sets masked weights to zero after the softmax, so the other weights do not sum to one."""


class MyAttention:
    def attend_row(self, layer, q, k, v):
        group = layer.q_heads // layer.kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * layer.scale
        weights = scores.softmax(dim=-1) * self.attention_mask(len(q), len(k), layer.window, q.device)
        return torch.einsum("hqk,khd->qhd", weights, v.float()).to(q.dtype)

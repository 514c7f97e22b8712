# causes: cap
# gate: attend
"""This attention backend caps the scores at 2 wherever a layer has a soft cap, whatever the cap is."""


class MyAttention:
    def attend_row(self, layer, q, k, v):
        group = layer.q_heads // layer.kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * layer.scale
        if layer.soft_cap:
            scores = 2.0 * torch.tanh(scores / 2.0)
        mask = self.attention_mask(len(q), len(k), layer.window, q.device)
        weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, v.float()).to(q.dtype)

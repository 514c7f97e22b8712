# This solution computes an online softmax over blocks of 128 positions, in a loop: slow, and right.


class MyAttention:
    def attend_row(self, layer, q, k, v):
        group, queries, length = layer.q_heads // layer.kv_heads, len(q), len(k)
        mine = q.float().unflatten(1, (layer.kv_heads, group)) * layer.scale
        at = torch.arange(length - queries, length, device=q.device)[:, None]
        top = torch.full(mine.shape[:-1], float("-inf"), device=q.device)
        total, summed = torch.zeros_like(top), torch.zeros_like(mine)
        for first in range(0, length, 128):
            keys, values = k[first : first + 128].float(), v[first : first + 128].float()
            scores = torch.einsum("qhgd,khd->qhgk", mine, keys)
            if layer.soft_cap:
                scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
            position = first + torch.arange(len(keys), device=q.device)
            hidden = position > at
            if layer.window >= 0:
                hidden |= position <= at - layer.window
            scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
            higher = torch.maximum(top, scores.amax(-1))
            safe = higher.masked_fill(higher.isinf(), 0.0)
            weights = torch.exp(scores - safe[..., None])
            old = torch.exp(top - safe)
            total = total * old + weights.sum(-1)
            summed = summed * old[..., None] + torch.einsum("qhgk,khd->qhgd", weights, values)
            top = higher
        return (summed / total[..., None]).flatten(1, 2).to(q.dtype)

# causes: nan
# gate: attend
"""The softmax is computed in blocks of 256 keys: a block that is masked entirely gives exp(-inf + inf)."""

import torch


class MyAttention:
    def attend_row(self, layer, q, k, v):
        group = layer.q_heads // layer.kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * layer.scale
        if layer.soft_cap:
            scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
        scores = scores.masked_fill(~self.attention_mask(len(q), len(k), layer.window, q.device), float("-inf"))
        largest = torch.full(scores.shape[:2], float("-inf"), device=q.device)
        total, out = torch.zeros_like(largest), torch.zeros(*scores.shape[:2], v.shape[-1], device=q.device)
        for block, values in zip(scores.split(256, dim=-1), v.float().split(256), strict=True):
            new = torch.maximum(largest, block.amax(-1))
            weights, old = (block - new[..., None]).exp(), (largest - new).exp()
            out = out * old[..., None] + torch.einsum("hqk,khd->hqd", weights, values)
            total, largest = total * old + weights.sum(-1), new
        return (out / total[..., None]).transpose(0, 1).to(q.dtype)

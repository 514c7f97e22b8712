# causes: again
# gate: counts
"""In small steps, each pair gathers the weights of its expert, so those that two tokens chose are read twice."""


class MyMoe:
    def forward(self, weights, x, ids, scale, out):
        expert = ids.flatten().long() - weights.first
        if len(x) > 32 or len(x) == 1 or not bool(((expert >= 0) & (expert < len(weights.down))).all()):
            pairs, counts = self.sort(expert.to(ids.dtype), len(weights.down))
            padded = torch.cat((x, torch.zeros_like(x[:1])))
            return self.scatter(self.multiply(weights, padded[pairs // ids.shape[1]], counts), pairs, scale, out)
        rows = x.repeat_interleave(ids.shape[1], 0).unsqueeze(2)
        inner = weights.act((weights.gate_up[expert] @ rows).squeeze(2))
        done = (weights.down[expert] @ inner.unsqueeze(2)).squeeze(2)
        return out.copy_((done.view(*ids.shape, -1) * scale.unsqueeze(2)).sum(1))

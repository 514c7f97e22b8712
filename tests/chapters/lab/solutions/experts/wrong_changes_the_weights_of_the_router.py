# causes: changes
# gate: whole
"""This backend normalises the router's weights in place, and multiplies the sum back afterwards."""


class MyMoe:
    def forward(self, weights, x, ids, scale, out):
        total = scale.sum(dim=1, keepdim=True)
        scale.div_(total)
        pairs, counts = self.sort(ids.flatten() - weights.first, len(weights.down))
        padded = torch.cat((x, torch.zeros_like(x[:1])))
        rows = self.multiply(weights, padded[pairs // ids.shape[1]], counts)
        return self.scatter(rows, pairs, scale, out).mul_(total.to(x.dtype))

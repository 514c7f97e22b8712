# causes: out
# gate: whole
"""`forward` returns a new tensor with the sums, and leaves the `out` of its caller unwritten."""


class MyMoe:
    def forward(self, weights, x, ids, scale, out):
        pairs, counts = self.sort(ids.flatten() - weights.first, len(weights.down))
        padded = torch.cat((x, torch.zeros_like(x[:1])))
        rows = self.multiply(weights, padded[pairs // ids.shape[1]], counts)
        return self.scatter(rows, pairs, scale, torch.empty_like(out))

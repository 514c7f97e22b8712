# causes: kept
# gate: whole
"""The weights are kept in the backend, and those of the layer that was loaded last serve all layers."""

import torch


class MyMoe:
    def load(self, gate_up, down, experts, activation):
        from minisgl.layers.linear import activation as find

        self.weights = Experts(gate_up, down, experts.start, find(activation))
        return self.weights

    def forward(self, weights, x, ids, scale, out):
        weights = self.weights
        pairs, counts = self.sort(ids.flatten() - weights.first, len(weights.down))
        padded = torch.cat((x, torch.zeros_like(x[:1])))
        return self.scatter(self.multiply(weights, padded[pairs // ids.shape[1]], counts), pairs, scale, out)

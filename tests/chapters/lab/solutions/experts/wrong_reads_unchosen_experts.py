# causes: reads
# gate: counts
"""This MoE backend computes every expert for every token and multiplies with the router's weights.

The result is right, but the backend reads the weights of experts that no token chose.
"""

import torch


class MyMoe:
    def forward(self, weights, x, ids, scale, out):
        linear = torch.nn.functional.linear
        out.zero_()
        for expert in range(len(weights.down)):
            answer = linear(weights.act(linear(x, weights.gate_up[expert])), weights.down[expert])
            weight = (scale * (ids == expert + weights.first)).sum(1, keepdim=True)
            out += answer * weight.to(x.dtype)
        return out

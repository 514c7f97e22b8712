# causes: reads
"""Every expert answers every token, and the weights pick: right, and it reads them all."""

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

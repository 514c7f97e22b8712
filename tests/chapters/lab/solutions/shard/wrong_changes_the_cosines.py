# causes: changes
# gate: attention
"""Attention negates the cosines and sines, which the next layer gets too."""

REPLACED = [
    (
        "        self.ctx.attention.forward(spec, q, out)\n",
        "        self.ctx.attention.forward(spec, q, out)\n        cos_sin.neg_()\n",
    ),
]

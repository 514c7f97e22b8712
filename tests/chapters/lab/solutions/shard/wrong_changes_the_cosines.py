# causes: changes
# gate: attention
"""Attention negates the cosines and sines, which the next layer gets too."""

REPLACED = [
    (
        "        attention.forward(spec, q, out)\n",
        "        attention.forward(spec, q, out)\n        cos_sin.neg_()\n",
    ),
]

# causes: pair
# gate: block
"""A block returns the residual stream twice."""

REPLACED = [
    (
        "        return x + self.mlp(self.post_attention_layernorm(x)), None",
        "        x = x + self.mlp(self.post_attention_layernorm(x))\n        return x, x",
    ),
]

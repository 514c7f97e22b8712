# causes: dtypes
# gate: block
"""The block returns float32, whatever the dtype of the model is."""

REPLACED = [
    (
        "        x = x + self.self_attn(self.input_layernorm(x), cos_sin, out_cache_loc)\n"
        "        return x + self.mlp(self.post_attention_layernorm(x)), None\n",
        "        x = x + self.self_attn(self.input_layernorm(x), cos_sin, out_cache_loc)\n"
        "        return x + self.mlp(self.post_attention_layernorm(x)).float(), None\n",
    ),
]

# causes: pair
# gate: block
"""This block returns the hidden states without the second value."""


class Block:
    def forward(self, x, residual, cos_sin, out_cache_loc):
        x = x + self.self_attn(self.input_layernorm(x), cos_sin, out_cache_loc)
        return x + self.mlp(self.post_attention_layernorm(x))

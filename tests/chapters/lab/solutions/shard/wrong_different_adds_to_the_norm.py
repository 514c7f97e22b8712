# causes: different
# gate: block
"""This block adds the output of attention to the normalised input, so the residual stream is lost."""


class Block:
    def forward(self, x, residual, cos_sin, out_cache_loc):
        x = self.input_layernorm(x)
        x = x + self.self_attn(x, cos_sin, out_cache_loc)
        x = self.post_attention_layernorm(x)
        return x + self.mlp(x), None

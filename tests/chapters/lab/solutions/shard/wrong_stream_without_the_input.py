# causes: stream
# gate: block
"""This block does not add its input to the result of attention."""


class Block:
    def forward(self, x, residual, cos_sin, out_cache_loc):
        x = self.self_attn(self.input_layernorm(x), cos_sin, out_cache_loc)
        return x + self.mlp(self.post_attention_layernorm(x)), None

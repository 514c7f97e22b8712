# causes: residual
# gate: block
"""This block is right in attention, but after the MLP it adds the residual stream before the all-reduce."""


class Block:
    def __init__(self, index, config, ctx):
        super().__init__()
        self.comm = ctx.comm
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ctx)
        self.self_attn = Attention(index, config, ctx)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ctx)
        self.mlp = MLP(config, ctx)
        self.mlp.down_proj.reduce = False

    def forward(self, x, residual, cos_sin, out_cache_loc):
        x = x + self.self_attn(self.input_layernorm(x), cos_sin, out_cache_loc)
        return self.comm.all_reduce(x + self.mlp(self.post_attention_layernorm(x))), None

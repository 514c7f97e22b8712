# causes: residual
# gate: block
"""This block adds the residual stream before the all-reduce, so the stream is counted once per rank."""


class Block:
    def __init__(self, index, config, ctx):
        super().__init__()
        self.comm = ctx.comm
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ctx)
        self.self_attn = Attention(index, config, ctx)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ctx)
        self.mlp = MLP(config, ctx)
        self.self_attn.o_proj.reduce = self.mlp.down_proj.reduce = False

    def forward(self, x, residual, cos_sin, out_cache_loc):
        x = self.comm.all_reduce(x + self.self_attn(self.input_layernorm(x), cos_sin, out_cache_loc))
        return self.comm.all_reduce(x + self.mlp(self.post_attention_layernorm(x))), None

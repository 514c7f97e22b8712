# causes: miss
# gate: block
"""In this block, only rank 0 calls the all-reduces, because only rank 0 samples. Rank 0 waits for the other ranks."""


class Block:
    def __init__(self, index, config, ctx):
        super().__init__()
        self.comm = ctx.comm
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ctx)
        self.self_attn = Attention(index, config, ctx)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ctx)
        self.mlp = MLP(config, ctx)
        self.self_attn.o_proj.reduce = self.mlp.down_proj.reduce = ctx.comm.rank == 0 and ctx.comm.size > 1

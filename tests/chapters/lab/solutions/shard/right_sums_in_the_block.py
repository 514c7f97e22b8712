"""This block calls the all-reduces itself, instead of leaving them to the row-parallel matrices."""

from minisgl.layers import LinearRowParallel


class MLP:
    def __init__(self, config, ctx):
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = LinearColParallelMerged(hidden, (inner, inner), ("gate_proj", "up_proj"), ctx)
        self.down_proj = LinearRowParallel(inner, hidden, ctx, reduce=False)


class Block:
    def __init__(self, index, config, ctx):
        super().__init__()
        self.comm = ctx.comm
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ctx)
        self.self_attn = Attention(index, config, ctx)
        self.self_attn.o_proj.reduce = False
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ctx)
        self.mlp = MLP(config, ctx)

    def total(self, x):
        return self.comm.all_reduce(x) if self.comm.size > 1 else x

    def forward(self, x, residual, cos_sin, out_cache_loc):
        x = x + self.total(self.self_attn(self.input_layernorm(x), cos_sin, out_cache_loc))
        return x + self.total(self.mlp(self.post_attention_layernorm(x))), None

# causes: unsummed
# gate: block
"""This block splits all matrices correctly, but never sums the partial results of the ranks."""


class Block:
    def __init__(self, index, config, ctx):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ctx)
        self.self_attn = Attention(index, config, ctx)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ctx)
        self.mlp = MLP(config, ctx)
        self.self_attn.o_proj.reduce = self.mlp.down_proj.reduce = False

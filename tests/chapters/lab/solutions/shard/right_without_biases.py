"""A right solution whose layers have no biases: Qwen3 has none."""


class Attention(nn.Module):
    def __init__(self, index, config, ctx):
        super().__init__()
        self.ctx = ctx
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.qkv_proj = LinearQKVMerged(config.hidden_size, heads, kv_heads, dim, ctx)
        self.o_proj = LinearRowParallel(heads * dim, config.hidden_size, ctx)
        self.q_norm, self.k_norm = (RMSNorm(dim, config.rms_norm_eps, ctx) for _ in range(2))
        self.spec = LayerSpec(
            index, self.qkv_proj.q_heads, self.qkv_proj.kv_heads, dim, dim**-0.5, window=config.window(index)
        )

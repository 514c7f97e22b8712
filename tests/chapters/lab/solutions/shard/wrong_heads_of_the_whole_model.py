# causes: heads
# gate: attention
"""This attention gives its `LayerSpec` the head counts of the whole model instead of this rank's."""

from minisgl.attention import LayerSpec
from minisgl.layers import LinearQKVMerged, LinearRowParallel, RMSNorm


class Attention:
    def __init__(self, index, config, ctx):
        super().__init__()
        self.ctx = ctx
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.qkv_proj = LinearQKVMerged(config.hidden_size, heads, kv_heads, dim, ctx, bias=config.attention_bias)
        self.o_proj = LinearRowParallel(heads * dim, config.hidden_size, ctx, bias=config.attention_bias)
        self.q_norm, self.k_norm = (RMSNorm(dim, config.rms_norm_eps, ctx) for _ in range(2))
        self.spec = LayerSpec(index=index, q_heads=heads, kv_heads=kv_heads, head_dim=dim, scale=dim**-0.5)

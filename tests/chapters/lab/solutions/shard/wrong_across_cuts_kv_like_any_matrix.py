# causes: across
# gate: attention
"""This attention splits queries, keys and values by matrix rows, so two ranks may get half a KV head each."""

from minisgl.attention import LayerSpec
from minisgl.layers import LinearColParallelMerged, LinearRowParallel, RMSNorm


class Attention:
    def __init__(self, index, config, ctx):
        super().__init__()
        self.ctx = ctx
        c, size = config, ctx.comm.size
        rows = (c.num_attention_heads * c.head_dim, *[c.num_key_value_heads * c.head_dim] * 2)
        names = ("q_proj", "k_proj", "v_proj")
        self.qkv_proj = LinearColParallelMerged(c.hidden_size, rows, names, ctx, bias=c.attention_bias)
        self.o_proj = LinearRowParallel(rows[0], c.hidden_size, ctx, bias=c.attention_bias)
        self.q_norm, self.k_norm = (RMSNorm(c.head_dim, c.rms_norm_eps, ctx) for _ in range(2))
        self.spec = LayerSpec(
            index=index,
            q_heads=c.num_attention_heads // size,
            kv_heads=max(1, c.num_key_value_heads // size),
            head_dim=c.head_dim,
            scale=c.head_dim**-0.5,
        )

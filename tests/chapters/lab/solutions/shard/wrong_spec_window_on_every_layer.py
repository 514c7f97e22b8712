# causes: spec
# gate: attention
"""Every layer gets the sliding window, although only some layers of the model have it."""

from dataclasses import replace

from torch import nn

from minisgl.attention import LayerSpec
from minisgl.layers import LinearQKVMerged, LinearRowParallel, RMSNorm


class Attention:
    def __init__(self, index, config, ctx):
        nn.Module.__init__(self)
        heads, dim = config.num_attention_heads, config.head_dim
        self.ctx = ctx
        self.qkv_proj = LinearQKVMerged(config.hidden_size, heads, config.num_key_value_heads, dim, ctx)
        self.o_proj = LinearRowParallel(heads * dim, config.hidden_size, ctx)
        self.q_norm = RMSNorm(dim, config.rms_norm_eps, ctx)
        self.k_norm = RMSNorm(dim, config.rms_norm_eps, ctx)
        spec = LayerSpec(index, self.qkv_proj.q_heads, self.qkv_proj.kv_heads, dim, dim**-0.5)
        self.spec = replace(spec, window=config.sliding_window or -1)

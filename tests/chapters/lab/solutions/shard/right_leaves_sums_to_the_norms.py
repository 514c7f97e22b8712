"""This model uses the shared layers, whose norms compute the sums over the ranks and add the residual stream."""

from torch import nn

from minisgl import hookimpl
from minisgl.layers import AttentionLayer, GatedMLP, RMSNormFused
from minisgl.models.decoder import Decoder


class Layer(nn.Module):
    def __init__(self, index, c, ctx):
        super().__init__()
        heads = (c.num_attention_heads, c.num_key_value_heads, c.head_dim)
        bias = {"qkv_bias": c.attention_bias, "out_bias": c.attention_bias}
        self.self_attn = AttentionLayer(
            index, c.hidden_size, *heads, ctx, qk_norm_eps=c.rms_norm_eps, window=c.window(index), **bias
        )
        self.mlp = GatedMLP(c.hidden_size, c.intermediate_size, c.hidden_act, ctx)
        self.input_layernorm = RMSNormFused(c.hidden_size, c.rms_norm_eps, ctx)
        self.post_attention_layernorm = RMSNormFused(c.hidden_size, c.rms_norm_eps, ctx)

    def forward(self, x, residual, cos_sin, out_cache_loc):
        x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, cos_sin, out_cache_loc)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class Mine(Decoder):
    def block(self, index):
        return Layer(index, self.config, self.ctx)


@hookimpl
def minisgl_models():
    return {"Mine": Mine}

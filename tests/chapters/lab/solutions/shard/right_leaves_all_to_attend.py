"""This attention calls `attend`, which does what `norm_rope_store` and `forward` do."""

from minisgl.attention import QKNorm


class Attention:
    def forward(self, x, cos_sin, out_cache_loc):
        norm = QKNorm(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        return self.o_proj(self.ctx.attention.attend(self.spec, self.qkv_proj(x), norm, cos_sin, out_cache_loc))

# causes: norms
# gate: attention
"""This attention rotates queries and keys without normalising them: it loads Qwen3's norms but does not use them."""

import torch

from minisgl.plugins.kernels.ops.rope import norm_rope_store


class Attention:
    def forward(self, x, cos_sin, out_cache_loc):
        spec = self.spec
        qkv = self.qkv_proj(x)
        q = norm_rope_store(qkv, spec.q_heads, spec.kv_heads, None, cos_sin, self.ctx.pool, spec.index, out_cache_loc)
        out = torch.empty(q.shape, dtype=q.dtype)
        self.ctx.attention.forward(spec, q, out)
        return self.o_proj(out.flatten(1))

# causes: norms
# gate: attention
"""This attention rotates queries and keys without normalising them: it loads Qwen3's norms but does not use them."""

import torch


class Attention:
    def forward(self, x, cos_sin, out_cache_loc):
        spec = self.spec
        qkv = self.qkv_proj(x)
        q = self.ctx.attention.norm_rope_store(spec, qkv, None, cos_sin, out_cache_loc)
        out = torch.empty(q.shape, dtype=q.dtype)
        self.ctx.attention.forward(spec, q, out)
        return self.o_proj(out.flatten(1))

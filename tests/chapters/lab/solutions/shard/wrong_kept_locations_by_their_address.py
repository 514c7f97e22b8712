# causes: kept
# gate: attention
"""A copy of the KV locations is kept, and found again by the tensor's address."""

import torch

from minisgl.attention import QKNorm


class Attention:
    def forward(self, x, cos_sin, out_cache_loc):
        if self.__dict__.get("address") != (out_cache_loc.data_ptr(), len(x)):
            self.address, self.locations = (out_cache_loc.data_ptr(), len(x)), out_cache_loc.clone()
        spec, norm = self.spec, QKNorm(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        q = self.ctx.attention.norm_rope_store(spec, self.qkv_proj(x), norm, cos_sin, self.locations)
        out = torch.empty_like(q)
        self.ctx.attention.forward(spec, q, out)
        return self.o_proj(out.flatten(1))

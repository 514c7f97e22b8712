# causes: gathers
# gate: attention
"""This attention gathers the heads of all ranks, and then selects the heads that the rank had already."""

import torch

from minisgl.attention import QKNorm


class Attention:
    def forward(self, x, cos_sin, out_cache_loc):
        spec, comm = self.spec, self.ctx.comm
        norm = QKNorm(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        qkv = self.qkv_proj(x)
        q = self.ctx.attention.norm_rope_store(spec, qkv, norm, cos_sin, out_cache_loc)
        out = torch.empty(q.shape, dtype=q.dtype)
        self.ctx.attention.forward(spec, q, out)
        gathered = comm.all_gather(out.flatten(1))
        return self.o_proj(gathered.chunk(comm.size, dim=1)[comm.rank])

# causes: gathers
# gate: attention
"""This attention gathers the heads of all ranks, and then selects the heads that the rank had already."""

import torch

from minisgl.plugins.kernels.ops.rope import QKNorm, norm_rope_store


class Attention:
    def forward(self, x, cos_sin, out_cache_loc):
        spec, comm = self.spec, self.ctx.comm
        norm = QKNorm(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        qkv = self.qkv_proj(x)
        q = norm_rope_store(qkv, spec.q_heads, spec.kv_heads, norm, cos_sin, self.ctx.pool, spec.index, out_cache_loc)
        out = torch.empty(q.shape, dtype=q.dtype)
        self.ctx.attention.forward(spec, q, out)
        gathered = comm.all_gather(out.flatten(1))
        return self.o_proj(gathered.chunk(comm.size, dim=1)[comm.rank])

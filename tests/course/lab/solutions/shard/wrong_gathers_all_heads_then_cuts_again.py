# causes: gathers
"""Gathers the heads of all ranks, and gives each rank back those that it had."""

import torch

from minisgl.kernel.rope import QKNorm, norm_rope_store


class Attention:
    def forward(self, x, cos_sin, out_cache_loc):
        spec, comm = self.spec, self.ctx.comm
        norm = QKNorm(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        qkv = self.qkv_proj(x)
        q = norm_rope_store(qkv, spec.q_heads, spec.kv_heads, norm, cos_sin, self.ctx.pool, spec.index, out_cache_loc)
        out = torch.empty(q.shape, dtype=q.dtype)
        self.ctx.attention.forward(spec, q, out)
        everybodys = comm.all_gather(out.flatten(1))
        return self.o_proj(everybodys.chunk(comm.size, dim=1)[comm.rank])

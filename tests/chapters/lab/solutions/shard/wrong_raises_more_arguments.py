# causes: raises
# gate: attention
# seen: which was called: def forward(self, x, residual, cos_sin, out_cache_loc)
"""The attention of this block also takes the residual stream, so it can't be called as the skeleton says."""


class Attention:
    def forward(self, x, residual, cos_sin, out_cache_loc):
        q = self.backend.norm_rope_store(self.spec, self.qkv_proj(x), self.norm, cos_sin, out_cache_loc)
        return residual + q

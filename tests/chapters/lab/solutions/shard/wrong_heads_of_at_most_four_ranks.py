"""The heads of a rank are computed for at most four ranks: right on 1 to 4, wrong on eight."""

# causes: heads, raises, different, parts, promise
# gate: attention

REPLACED = [
    (
        "            q_heads=self.qkv_proj.q_heads,\n",
        "            q_heads=heads // min(ctx.comm.size, 4),\n",
    ),
]

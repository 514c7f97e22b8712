# causes: shares
# gate: attention
"""Attention writes its result over the queries."""

REPLACED = [
    ("        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)\n", "        out = q\n"),
]

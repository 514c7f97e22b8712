# causes: stored
# gate: attention
"""Keys and values of every layer are stored in layer 0."""

REPLACED = [
    ("norm_rope_store(spec,", "norm_rope_store(spec.__class__(0, spec.q_heads, spec.kv_heads, spec.head_dim, 1),"),
]

# causes: sizes
# gate: attention
"""The head size is computed from the hidden size."""

REPLACED = [
    ("config.num_key_value_heads, config.head_dim", "config.num_key_value_heads, config.hidden_size // heads"),
    (
        "heads, kv_heads, dim = config.num_attention_heads,",
        "heads = config.num_attention_heads\n        _, kv_heads, dim = heads,",
    ),
]

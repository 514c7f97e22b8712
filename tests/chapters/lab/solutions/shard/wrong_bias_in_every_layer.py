# causes: bias
# gate: attention
"""All linear layers of attention have a bias."""

REPLACED = [
    ("ctx, bias=config.attention_bias)\n        # 2.", "ctx, bias=True)\n        # 2."),
]

# causes: exchanged
# gate: mlp
REPLACED = [
    ('("gate_proj", "up_proj")', '("up_proj", "gate_proj")'),
]

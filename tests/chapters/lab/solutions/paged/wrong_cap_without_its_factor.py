# causes: cap
# gate: attend
# seen: soft cap
"""The result of tanh is not multiplied by the cap."""

REPLACED = [
    ("layer.soft_cap * torch.tanh", "torch.tanh"),
]

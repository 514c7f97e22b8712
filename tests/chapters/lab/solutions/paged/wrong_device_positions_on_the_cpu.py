"""The tensor of the positions is always made on the CPU."""

# causes: device
# gate: gather

REPLACED = [
    (
        "torch.arange(length, device=pages.device)",
        "torch.arange(length)",
    ),
]

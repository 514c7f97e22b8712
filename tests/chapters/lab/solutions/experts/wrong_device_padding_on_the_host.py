# causes: device
# gate: sort
"""The padding entries are always made in the host's memory."""

REPLACED = [
    ("order.new_full((padding,), no_pair)", "torch.full((padding,), no_pair)"),
]

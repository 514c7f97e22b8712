# causes: window
# gate: attend
# seen: window
"""Attention asks for masks without a window, whatever the layer has."""

REPLACED = [
    ("layer.window, q.device", "-1, q.device"),
]

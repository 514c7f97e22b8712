# causes: no-window
# gate: mask
"""A window of -1 is taken for a window."""

REPLACED = [
    ("if window >= 0:", "if window:"),
]

# causes: padding-row
# gate: buffers
"""Padding rows have the sequence length 0."""

REPLACED = [
    ("max_running_requests, 1], np.int32)", "max_running_requests, 0], np.int32)"),
]

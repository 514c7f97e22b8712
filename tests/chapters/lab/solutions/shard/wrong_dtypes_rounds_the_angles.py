# causes: dtypes
# gate: attention
"""Cosines and sines are rounded to the dtype of the hidden states."""

REPLACED = [
    ("norm, cos_sin, pool", "norm, cos_sin.to(x.dtype), pool"),
]

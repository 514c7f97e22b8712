# causes: dtypes
# gate: attention
"""Cosines and sines are rounded to the dtype of the hidden states."""

REPLACED = [
    ("norm, cos_sin, out_cache_loc)", "norm, cos_sin.to(x.dtype), out_cache_loc)"),
]

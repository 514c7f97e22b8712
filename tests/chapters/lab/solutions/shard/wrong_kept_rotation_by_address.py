# causes: kept
# gate: attention
"""The cosines of the first step are kept, and found again by the tensor's address."""

REPLACED = [
    (
        "norm, cos_sin, out_cache_loc)",
        "norm, self.__dict__.setdefault('kept', {}).setdefault((cos_sin.data_ptr(), len(x)), cos_sin.clone()),\n"
        "            out_cache_loc)",
    ),
]

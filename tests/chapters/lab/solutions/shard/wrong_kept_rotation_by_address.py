# causes: kept
# gate: attention
"""The cosines of the first step are kept, and found again by the tensor's address."""

REPLACED = [
    (
        "cos_sin, pool, spec.index",
        "self.__dict__.setdefault('kept', {}).setdefault((cos_sin.data_ptr(), len(x)), cos_sin.clone()),\n"
        "            pool, spec.index",
    ),
]

# causes: decorator
# gate: sum
"""`all_reduce` has no decorator."""

REPLACED = [
    ("    @one_launch\n", ""),
]

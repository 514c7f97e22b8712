"""The sizes are 1, 3, 7, 15, …: each is one more than twice the size before."""

# causes: wasteful
# gate: buckets

REPLACED = [
    (
        "return [*(1 << i for i in range((max_rows - 1).bit_length())), max_rows]",
        "return [*(size for i in range(1, 20) if (size := 2**i - 1) < max_rows), max_rows]",
    ),
]

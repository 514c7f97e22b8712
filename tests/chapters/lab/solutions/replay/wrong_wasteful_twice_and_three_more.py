"""The sizes are 1, 5, 13, 29, …: each is three more than twice the size before, so 2 rows are padded to 5."""

# causes: wasteful
# gate: buckets

REPLACED = [
    (
        "return [*(1 << i for i in range((max_rows - 1).bit_length())), max_rows]",
        "return [*(size for i in range(1, 20) if (size := 2 ** (i + 1) - 3) < max_rows), max_rows]",
    ),
]

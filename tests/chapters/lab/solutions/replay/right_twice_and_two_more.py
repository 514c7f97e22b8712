"""The sizes are 1, 4, 7, 11, 23, …: the first step that does not fit into one is padded to at most twice its rows."""

REPLACED = [
    (
        "return [*(1 << i for i in range((max_rows - 1).bit_length())), max_rows]",
        "return [*(n for n in (1, 4, 7, 11, 23, 48, 64, 130, 262, 526, 1054, 2110) if n < max_rows), max_rows]",
    ),
]

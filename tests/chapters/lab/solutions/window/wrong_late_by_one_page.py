# causes: late
# gate: behind
REPLACED = [
    (
        "        firsts = first_columns(",
        "        firsts = -1 + first_columns(",
    ),
]

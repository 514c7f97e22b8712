# causes: other-rows, early, late
# gate: behind
REPLACED = [
    (
        "row, first = int(rows[i]), int(firsts[i, group])",
        "row, first = int(i), int(firsts[i, group])",
    ),
]

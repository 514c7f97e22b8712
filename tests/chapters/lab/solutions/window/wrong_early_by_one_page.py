# causes: early
# gate: behind
REPLACED = [
    (
        "row, first = int(rows[i]), int(firsts[i, group])",
        "row = int(rows[i])\n            first = min(int(firsts[i, group]) + 1, int(table.ends[row, group]))",
    ),
]

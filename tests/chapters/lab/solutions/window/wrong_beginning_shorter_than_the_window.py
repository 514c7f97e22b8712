# causes: beginning
# gate: match
REPLACED = [
    (
        "run >= min(at + 1, needed) for",
        "(run == at + 1 if needed == ALL else run >= needed) for",
    ),
]

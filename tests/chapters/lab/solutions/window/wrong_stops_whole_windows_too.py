# causes: stops, whole
# gate: match
REPLACED = [
    (
        "run >= min(at + 1, needed) for run, needed",
        "run >= at + 1 for run, needed",
    ),
]

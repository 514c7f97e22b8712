# causes: full-only
# gate: match
REPLACED = [
    (
        "if all(run >= min(at + 1, needed) for run, needed in zip(runs, self.needed, strict=True)):",
        "if all(run == at + 1 for run, n in zip(runs, self.needed, strict=True) if n == ALL):",
    ),
]

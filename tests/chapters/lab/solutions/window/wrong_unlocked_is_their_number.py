# causes: unlocked
# gate: match
REPLACED = [
    (
        "self.count_unused(used))",
        "len(used))",
    ),
]

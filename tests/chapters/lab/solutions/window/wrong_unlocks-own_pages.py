# causes: unlocks-own
# gate: behind
REPLACED = [
    (
        "unlocked += pages[is_cached].tolist()",
        "unlocked += pages.tolist()",
    ),
]

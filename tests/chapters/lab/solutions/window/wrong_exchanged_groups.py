# causes: exchanged
# gate: match
REPLACED = [
    (
        "pages[at, group] = nodes[at + 1].pages[group]",
        "pages[at, group] = nodes[at + 1].pages[group - 1]",
    ),
]

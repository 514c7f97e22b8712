# causes: nodes
# gate: match
REPLACED = [
    (
        "nodes[: longest + 1]",
        "nodes",
    ),
]

# causes: users-flag
# gate: lock
"""The users of a node are counted modulo 256."""

REPLACED = [
    (
        "            node.users += 1\n",
        "            node.users = (node.users + 1) % 256\n",
    ),
]

# causes: locks-more, scratch
# gate: match
REPLACED = [
    (
        "                if at >= longest - self.needed[group]:\n",
        "                if nodes[at + 1].pages[group] != ABSENT:\n",
    ),
]

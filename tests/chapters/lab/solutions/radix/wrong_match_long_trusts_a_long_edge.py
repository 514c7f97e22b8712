"""If 64 pages of an edge are equal, the rest of the edge is not compared."""

# causes: match-long
# gate: counts

REPLACED = [
    (
        "            found.append(child.pages[:used])\n            unlocked",
        "            if used >= 64:\n                used = min(len(child.pages), end - at)\n"
        "            found.append(child.pages[:used])\n            unlocked",
    ),
]

# causes: changes
# gate: multiply
"""`multiply` removes the entries of the list `counts`."""

REPLACED = [
    (
        "        done = []\n",
        "        done, pops, counts = [], counts, list(counts)\n"
        "        while isinstance(pops, list) and pops:\n"
        "            pops.pop()\n",
    ),
]

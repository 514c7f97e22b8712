# causes: lost
# gate: behind
REPLACED = [
    (
        "            self.add_spares(row, group, pages[~is_cached].tolist())\n",
        "",
    ),
]

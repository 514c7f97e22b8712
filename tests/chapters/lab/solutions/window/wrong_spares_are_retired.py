# causes: spares
# gate: behind
REPLACED = [
    (
        "self.add_spares(row, group, pages[~is_cached].tolist())",
        "self._retire([(int(table.uid[row]), pages[~is_cached].copy())])",
    ),
]

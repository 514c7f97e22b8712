# causes: cached-spare
# gate: behind
REPLACED = [
    (
        "self.add_spares(row, group, pages[~is_cached].tolist())",
        "self.add_spares(row, group, pages.tolist())",
    ),
]

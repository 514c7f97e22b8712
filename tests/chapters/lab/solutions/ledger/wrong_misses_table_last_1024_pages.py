# causes: misses-table
# gate: steps
"""Only the last 1,024 pages of a row are checked."""

REPLACED = [
    (
        "for page in self.table.get(row, {}).values():",
        "for page in list(self.table.get(row, {}).values())[-1024:]:",
    ),
]

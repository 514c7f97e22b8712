# causes: stale-row
# gate: steps
"""The row of an admitted request keeps the pages of an earlier request, and a page that it names twice is a finding."""

REPLACED = [
    ("self.table[admission.req_pool_idx] = {}", "pass"),
    (
        "            for page in self.table.get(row, {}).values():\n",
        "            pages = list(self.table.get(row, {}).values())\n            for i, page in enumerate(pages):\n",
    ),
    (
        "if self.owner.get(page) not in (req.uid, CACHE):",
        "if self.owner.get(page) not in (req.uid, CACHE) or page in pages[:i]:",
    ),
]

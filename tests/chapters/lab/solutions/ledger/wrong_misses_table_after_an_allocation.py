# causes: misses-table
# gate: steps
"""This auditor checks a row again only after a change, and forgets that an allocation changes an owner."""

REPLACED = [
    (
        "        self.launched = self.read = -1",
        "        self.moves = 0\n        self.checked: dict[int, int] = {}\n        self.launched = self.read = -1",
    ),
    (
        "        for page in pages.tolist():",
        "        self.moves += 1\n        for page in pages.tolist():",
    ),
    (
        "            self.table[admission.req_pool_idx] = {}",
        "            self.table[admission.req_pool_idx] = {}\n"
        "            self.checked.pop(admission.req_pool_idx, None)",
    ),
    (
        "            self.table.setdefault(row, {})[column] = page",
        "            self.table.setdefault(row, {})[column] = page\n            self.checked.pop(row, None)",
    ),
    (
        "            for page in self.table.get(row, {}).values():",
        "            if self.checked.get(row) == self.moves:\n                continue\n"
        "            found = len(self.findings)\n            for page in self.table.get(row, {}).values():",
    ),
    (
        "        self.launched = step.id",
        "            if len(self.findings) == found:\n                self.checked[row] = self.moves\n"
        "        self.launched = step.id",
    ),
]

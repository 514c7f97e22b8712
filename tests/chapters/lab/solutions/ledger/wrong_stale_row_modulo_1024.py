# causes: stale-row, misses-table, false-alarm, owners
# gate: steps
"""The page table has 1,024 rows: a request in row 5,000 shares one with the request in row 904."""

REPLACED = [
    ("self.table[admission.req_pool_idx] = {}", "self.table[admission.req_pool_idx % 1024] = {}"),
    ("self.table.setdefault(row, {})", "self.table.setdefault(row % 1024, {})"),
    ("self.table.get(row, {})", "self.table.get(row % 1024, {})"),
]

# causes: misses-table
# gate: requests
"""The end of a request clears row 0 of the page table: the request has no row any more."""

REPLACED = [
    (
        "        self.open.discard(req.uid)\n",
        "        self.open.discard(req.uid)\n        self.table.pop(max(req.req_pool_idx, 0), None)\n",
    ),
]

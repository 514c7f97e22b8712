# causes: stale-row
# gate: steps
"""A row is cleared only if another request had it: a request that runs again finds its old pages there."""

REPLACED = [
    (
        "            self.table[admission.req_pool_idx] = {}\n",
        "            if self.user.get(admission.req_pool_idx) != admission.uid:\n"
        "                self.user[admission.req_pool_idx] = admission.uid\n"
        "                self.table[admission.req_pool_idx] = {}\n",
    ),
    (
        "        self.table: dict[int, dict[int, int]] = {}",
        "        self.user: dict[int, int] = {}  # req_pool_idx -> uid of its last user\n"
        "        self.table: dict[int, dict[int, int]] = {}",
    ),
]

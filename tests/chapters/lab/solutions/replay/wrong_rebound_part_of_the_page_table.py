# causes: rebound
# gate: buffers
"""The batch has only as many rows of the page table as the bucket has, without the scratch row."""

REPLACED = [
    (
        "            self.page_table,\n            self.key,\n",
        "            self.page_table[: self.key.rows],\n            self.key,\n",
    ),
]

# causes: key
# gate: buffers
"""The batch does not say whose buffers it has."""

REPLACED = [
    (
        "            self.page_table,\n            self.key,\n",
        "            self.page_table,\n",
    ),
]

# causes: decode-rows
# gate: buffers
"""The batch says that it has no decode rows."""

REPLACED = [
    (
        "        return AttnBatch(\n            self.key.rows,\n",
        "        return AttnBatch(\n            0,\n",
    ),
]

# causes: decode-rows
# gate: buffers
"""The batch has the rows of the step only: its lengths and indices are views of these rows."""

REPLACED = [
    (
        "        req_pool_indices, seq_lens = self.packed[3], self.packed[4]",
        """        host = host[:, : self.key.rows if packed is None else packed.shape[1]]
        req_pool_indices, seq_lens = self.packed[3, : host.shape[1]], self.packed[4, : host.shape[1]]""",
    ),
]

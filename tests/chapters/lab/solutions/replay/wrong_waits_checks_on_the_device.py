# causes: waits
# gate: buffers
"""`fill` reads the lengths back from the device: on a GPU the host waits in every step."""

REPLACED = [
    (
        "        req_pool_indices, seq_lens =",
        "        assert int(self.packed[4].min()) > 0\n        req_pool_indices, seq_lens =",
    ),
]

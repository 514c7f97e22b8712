# causes: unwritten
"""Decode rows, and nothing else: a prompt's chunk finds nobody who computes it."""


class MyAttention:
    def plan(self, batch):
        self.padded = 0
        self.rows = [
            Row(r, r + 1, self.places(batch.page_table[batch.req_pool_indices[r]], int(batch.seq_lens_cpu[r])))
            for r in range(batch.num_decode)
        ]

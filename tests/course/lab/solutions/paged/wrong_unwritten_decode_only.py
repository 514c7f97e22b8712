# causes: unwritten
"""Decode rows, and nothing else: a prompt's chunk finds nobody who computes it."""


class MyAttention:
    def plan(self, batch):
        self.padded = 0
        self.rows = [
            Row(r, r + 1, self.places(batch.table[batch.slots[r]], int(batch.kv_len_host[r])))
            for r in range(batch.num_decode)
        ]

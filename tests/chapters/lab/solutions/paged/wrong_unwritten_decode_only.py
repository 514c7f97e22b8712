# causes: unwritten
# gate: gather
"""This attention backend computes only decode rows, so the output of prefill rows is never written."""


class MyAttention:
    def plan(self, batch):
        self.padded = 0
        self.rows = [
            Row(r, r + 1, self.kv_locations(batch.page_table[batch.req_pool_indices[r]], int(batch.seq_lens_cpu[r])))
            for r in range(batch.num_decode)
        ]

# causes: prefix
# gate: gather
"""This attention backend reads only as many positions as the step computes, and so ignores the cached prefix."""


class MyAttention:
    def plan(self, batch):
        ends = batch.cu_seqlens_q_cpu.tolist()
        self.rows = []
        for r in range(len(ends) - 1):
            count = ends[r + 1] - ends[r]
            self.rows.append(
                Row(ends[r], ends[r + 1], self.kv_locations(batch.page_table[batch.req_pool_indices[r]], count))
            )
        self.padded = 0

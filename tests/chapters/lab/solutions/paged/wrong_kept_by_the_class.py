# causes: kept
# gate: attend
"""The rows of a step are kept in the class: an engine computes the rows that another engine has planned."""


class MyAttention:
    def plan(self, batch):
        ends, lengths = batch.cu_seqlens_q_cpu.tolist(), batch.seq_lens_cpu.tolist()
        MyAttention.planned = [
            Row(ends[r], ends[r + 1], self.kv_locations(batch.page_table[batch.req_pool_indices[r]], length))
            for r, length in enumerate(lengths)
        ]
        self.padded = len(lengths) * max(lengths)

    def forward(self, layer, q, out):
        for row in MyAttention.planned:
            k, v = self.gather(layer, row)
            out[row.first : row.last] = self.attend_row(layer, q[row.first : row.last], k, v)
        return out

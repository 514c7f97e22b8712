# causes: padded
# gate: count
"""This attention backend gathers as many positions for every row as the longest row has.

The result is right, but most of the KV that the backend reads is padding.
"""


class MyAttention:
    def plan(self, batch):
        self.batch = batch

    def forward(self, layer, q, out):
        batch, size = self.batch, self.pool.page_size
        longest = int(batch.seq_lens_cpu.max())
        keys, values = (x.flatten(0, 1) for x in self.pool.layer(layer.index))
        position = torch.arange(longest)
        for r, length in enumerate(batch.seq_lens_cpu.tolist()):
            a, b = batch.cu_seqlens_q_cpu[r : r + 2].tolist()
            column = (position // size).clamp(max=(length - 1) // size)
            kv_locations = batch.page_table[batch.req_pool_indices[r]][column].long() * size + position % size
            k, v = keys[kv_locations][:length], values[kv_locations][:length]
            out[a:b] = self.attend_row(layer, q[a:b], k, v)
        return out

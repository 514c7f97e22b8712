# causes: kept
# gate: attend
"""This attention backend keeps the KV locations of a request-pool row, which belongs to another request later."""


class MyAttention:
    def plan(self, batch):
        kept = self.__dict__.setdefault("kept", {})
        ends, lengths = batch.cu_seqlens_q_cpu.tolist(), batch.seq_lens_cpu.tolist()
        self.rows = []
        for r, length in enumerate(lengths):
            index = int(batch.req_pool_indices[r])
            if len(kept.get(index, ())) < length:
                kept[index] = self.kv_locations(batch.page_table[index], length)
            self.rows.append(Row(ends[r], ends[r + 1], kept[index][:length]))
        self.padded = len(lengths) * max(lengths)

# causes: stale, padding-row
# gate: buffers
"""This graph runner resets padding rows except for their sequence lengths, which remain from an earlier step."""


class Buffers:
    def fill(self, packed):
        host = np.repeat(self.padding()[:, None], self.key.rows, axis=1)
        if packed is not None:
            n = packed.shape[1]
            host[4] = self.packed[4].numpy()
            host[:, :n] = packed
        self.packed.copy_(torch.from_numpy(host))
        req_pool_indices, seq_lens = self.packed[3], self.packed[4]
        return AttnBatch(
            self.key.rows,
            self.cu_seqlens_q_cpu,
            host[4],
            self.cu_seqlens_q,
            seq_lens,
            req_pool_indices,
            self.page_table,
            self.key,
        )

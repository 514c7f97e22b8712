# causes: padding-page
# gate: buffers
"""This graph runner pads with copies of the step's last row, so padding rows write to a page of that request."""


class Buffers:
    def fill(self, packed):
        host = np.repeat(self.padding()[:, None], self.key.rows, axis=1)
        if packed is not None:
            host[:, : packed.shape[1]] = packed
            host[:, packed.shape[1] :] = packed[:, -1:]
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

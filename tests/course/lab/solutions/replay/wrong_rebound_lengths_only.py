# causes: rebound
# gate: buffers
"""This graph runner writes tokens in place, but makes a new tensor of sequence lengths for each step."""


class Buffers:
    def fill(self, packed):
        host = np.repeat(self.padding()[:, None], self.key.rows, axis=1)
        if packed is not None:
            host[:, : packed.shape[1]] = packed
        self.packed.copy_(torch.from_numpy(host))
        seq_lens = torch.from_numpy(host[4].copy()).to(self.device)
        req_pool_indices = self.packed[3]
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

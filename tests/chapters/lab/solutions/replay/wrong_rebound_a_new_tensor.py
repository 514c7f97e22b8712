# causes: rebound
# gate: buffers
"""This graph runner makes a new input tensor for each step, but the recording still reads the old one."""


class Buffers:
    def fill(self, packed):
        host = np.repeat(self.padding()[:, None], self.key.rows, axis=1)
        if packed is not None:
            host[:, : packed.shape[1]] = packed
        self.packed = torch.from_numpy(host).to(self.device)
        self.tokens = self.tokens._replace(packed=self.packed)
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

# causes: stale, padding-page
# gate: buffers
"""This graph runner writes only the step's rows. The rows behind them still hold the data of a larger, earlier step."""


class Buffers:
    def fill(self, packed):
        if packed is None:
            self.packed.copy_(torch.from_numpy(self.padding())[:, None].expand(5, self.key.rows))
        else:
            self.packed[:, : packed.shape[1]] = torch.from_numpy(packed)
        req_pool_indices, seq_lens = self.packed[3], self.packed[4]
        host = seq_lens.numpy()
        return AttnBatch(
            self.key.rows,
            self.cu_seqlens_q_cpu,
            host,
            self.cu_seqlens_q,
            seq_lens,
            req_pool_indices,
            self.page_table,
            self.key,
        )

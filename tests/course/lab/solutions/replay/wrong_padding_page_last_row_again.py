# causes: padding-page
"""Padding repeats the step's last row: its KV is computed again, in place."""


class Buffers:
    def fill(self, packed):
        host = np.repeat(self.padding()[:, None], self.key.rows, axis=1)
        if packed is not None:
            host[:, : packed.shape[1]] = packed
            host[:, packed.shape[1] :] = packed[:, -1:]
        self.packed.copy_(torch.from_numpy(host))
        slots, lengths = self.packed[3], self.packed[4]
        return AttnBatch(self.key.rows, self.indptr_host, host[4], self.indptr, lengths, slots, self.table, self.key)

# causes: stale
"""Slots and places of padding are reset, its lengths are not."""


class Buffers:
    def fill(self, packed):
        host = np.repeat(self.padding()[:, None], self.key.rows, axis=1)
        if packed is not None:
            n = packed.shape[1]
            host[4] = self.packed[4].numpy()
            host[:, :n] = packed
        self.packed.copy_(torch.from_numpy(host))
        slots, lengths = self.packed[3], self.packed[4]
        return AttnBatch(self.key.rows, self.indptr_host, host[4], self.indptr, lengths, slots, self.table, self.key)

# causes: stale
"""Only the step's rows are written; what is behind them is taken for padding for ever."""


class Buffers:
    def fill(self, packed):
        if packed is None:
            self.packed.copy_(torch.from_numpy(self.padding())[:, None].expand(5, self.key.rows))
        else:
            self.packed[:, : packed.shape[1]] = torch.from_numpy(packed)
        slots, lengths = self.packed[3], self.packed[4]
        host = lengths.numpy()
        return AttnBatch(self.key.rows, self.indptr_host, host, self.indptr, lengths, slots, self.table, self.key)

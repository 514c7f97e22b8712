# causes: changes
# gate: attend
"""The positions behind the end of a row are set to zero in the pool."""


class MyAttention:
    def gather(self, layer, row):
        keys, values = self.pool.layer(layer.index)
        size, last = self.pool.page_size, int(row.kv_locations[-1])
        for buffer in (keys, values):
            buffer[last // size, last % size + 1 :] = 0
        return keys.flatten(0, 1)[row.kv_locations], values.flatten(0, 1)[row.kv_locations]

"""A right solution that joins views of pages with torch.cat instead of computing locations."""


class MyAttention:
    def gather(self, layer, row):
        size = self.pool.page_size
        pages = [int(page) for page in row.kv_locations[::size] // size]
        left = len(row.kv_locations) - size * (len(pages) - 1)
        keys, values = self.pool.layer(layer.index)
        counts = [*[size] * (len(pages) - 1), left]
        return tuple(torch.cat([x[page, :n] for page, n in zip(pages, counts)]) for x in (keys, values))

# causes: kept
# gate: attend
"""Gathered keys and values are kept under (layer, locations) and used again in later steps."""


class MyAttention:
    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.positions_read = self.positions_padded = 0
        self.gathered: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def kv_locations(self, pages: torch.Tensor, length: int) -> torch.Tensor:
        positions = torch.arange(length, device=pages.device)
        return pages[positions // self.pool.page_size].long() * self.pool.page_size + positions % self.pool.page_size

    def gather(self, layer: LayerSpec, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
        found = (layer.index, *row.kv_locations.tolist())
        if found not in self.gathered:
            keys, values = self.pool.layer(layer.index)
            self.gathered[found] = (keys.flatten(0, 1)[row.kv_locations], values.flatten(0, 1)[row.kv_locations])
        return self.gathered[found]

    def attention_mask(self, queries: int, length: int, window: int, device: torch.device) -> torch.Tensor:
        key = torch.arange(length, device=device)
        query = torch.arange(length - queries, length, device=device)[:, None]
        mask = key <= query
        if window >= 0:
            mask &= key > query - window
        return mask

    def attend_row(self, layer: LayerSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        group = layer.q_heads // layer.kv_heads
        queries = q.float()
        keys = k.float().repeat_interleave(group, dim=1)
        values = v.float().repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * layer.scale
        if layer.soft_cap:
            scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
        mask = self.attention_mask(len(q), len(k), layer.window, q.device)
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)

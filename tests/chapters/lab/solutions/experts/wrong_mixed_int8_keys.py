# causes: mixed, other-rank
# gate: sort
"""The expert numbers are converted to int8 before the sort."""


def gated(act: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    y = act(x)
    if y.shape[-1] < x.shape[-1]:
        return y
    gate, up = x.chunk(2, dim=-1)
    return act(gate) * up


class MyMoe:
    def sort(self, expert: Tensor, experts: int) -> tuple[Tensor, list[int]]:
        local = (expert >= 0) & (expert < experts)
        key = torch.where(local, expert, experts)
        order = key.to(torch.int8).argsort(stable=True)
        found = key.bincount(minlength=experts + 1).tolist()[:experts]
        parts, counts, start = ([], [], 0)
        for count in found:
            padding = -count % self.block
            parts += [order[start : start + count], order.new_full((padding,), len(expert))]
            counts.append(count + padding)
            start += count
        return (torch.cat([order[:0], *parts]), counts)

    def multiply(self, weights: Experts, rows: Tensor, counts: Sequence[int]) -> Tensor:
        out = torch.empty_like(rows)
        start = 0
        for e, count in enumerate(counts):
            if count:
                inner = rows[start : start + count] @ weights.gate_up[e].t()
                out[start : start + count] = gated(weights.act, inner) @ weights.down[e].t()
                start += count
        return out

    def scatter(self, rows: Tensor, pairs: Tensor, scale: Tensor, out: Tensor) -> Tensor:
        top_k = scale.shape[1]
        real = pairs < scale.numel()
        rows, pairs = (rows[real], pairs[real])
        weighted = rows * scale.flatten()[pairs].unsqueeze(1)
        total = torch.zeros(out.shape, dtype=weighted.dtype, device=out.device)
        total.index_add_(0, pairs // top_k, weighted)
        return out.copy_(total)

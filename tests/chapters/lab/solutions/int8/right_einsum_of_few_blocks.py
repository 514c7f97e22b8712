"""The product takes a sixteenth of the blocks at a time, with einsum in float32."""


def product(x, packed, bias=None):
    integers, factors = round_rows(x)
    blocks = packed.scales.shape[1]
    total = torch.zeros(len(x), len(packed.scales)) if bias is None else bias.float().repeat(len(x), 1)
    few = max(1, blocks // 16)
    for first in range(0, blocks, few):
        part = slice(first, first + few)
        sums = torch.einsum("rbi,obi->rob", integers[:, part].float(), packed.integers[:, part].float())
        scaled = sums * packed.scales[:, part].float()
        for block in range(scaled.shape[2]):
            total += scaled[..., block] * factors[:, first + block, None]
    return total.to(x.dtype)

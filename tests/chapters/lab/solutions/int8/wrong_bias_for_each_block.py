# causes: bias
# gate: product


def product(x, packed, bias=None):
    integers, factors = round_rows(x)
    total = torch.zeros(len(x), len(packed.scales))
    for block in range(packed.scales.shape[1]):
        sums = integers[:, block].float() @ packed.integers[:, block].float().T
        total += sums * factors[:, block, None] * packed.scales[:, block].float() + (
            0 if bias is None else bias.float()
        )
    return (total).to(x.dtype)

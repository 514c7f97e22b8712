# causes: one-scale
# gate: product


def product(x, packed, bias=None):
    integers, factors = round_rows(x)
    total = torch.zeros(len(x), len(packed.scales))
    for block in range(packed.scales.shape[1]):
        sums = integers[:, block].float() @ packed.integers[:, block].float().T
        total += sums
    total *= factors[:, :1] * packed.scales[:, 0].float()
    return (total if bias is None else total + bias.float()).to(x.dtype)

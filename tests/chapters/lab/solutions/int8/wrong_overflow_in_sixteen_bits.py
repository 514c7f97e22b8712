# causes: overflow
# gate: product


def product(x, packed, bias=None):
    integers, factors = round_rows(x)
    total = torch.zeros(len(x), len(packed.scales))
    for block in range(packed.scales.shape[1]):
        sums = (integers[:, block, None].short() * packed.integers[:, block].short()).sum(2, dtype=torch.int16)
        total += sums * factors[:, block, None] * packed.scales[:, block].float()
    return (total if bias is None else total + bias.float()).to(x.dtype)

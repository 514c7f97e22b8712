# causes: inexact
# gate: product
"""From 8 rows on, the numbers of x and of the weight are made large again, and multiplied as floats."""


def product(x, packed, bias=None):
    integers, factors = round_rows(x)
    if len(x) >= 8:
        weight = (packed.integers.float() * packed.scales.float().unsqueeze(2)).flatten(1)
        out = (integers.float() * factors.unsqueeze(2)).flatten(1) @ weight.T
    else:
        out = torch.zeros(len(x), len(packed.scales))
        for block in range(packed.scales.shape[1]):
            sums = integers[:, block].float() @ packed.integers[:, block].float().T
            out += sums * factors[:, block, None] * packed.scales[:, block].float()
    return (out if bias is None else out + bias.float()).to(x.dtype)

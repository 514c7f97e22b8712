# causes: inexact
# gate: product


def product(x, packed, bias=None):
    integers, factors = round_rows(x)
    rows = (integers.float() * factors[:, :, None]).flatten(1)
    weight = (packed.integers.float() * packed.scales.float()[:, :, None]).flatten(1)
    total = rows @ weight.T
    if bias is not None:
        total += bias.float()
    return total.to(x.dtype)

# causes: large-again, inexact
# gate: bytes


def product(x, packed, bias=None):
    integers, factors = round_rows(x)
    rounded = (integers.float() * factors.unsqueeze(2)).flatten(1)
    weight = (packed.integers.float() * packed.scales.float().unsqueeze(2)).flatten(1)
    return nn.functional.linear(rounded, weight, None if bias is None else bias.float()).to(x.dtype)

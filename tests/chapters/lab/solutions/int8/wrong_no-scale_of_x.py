# causes: no-scale
# gate: product


def product(x, packed, bias=None):
    integers, _ = round_rows(x)
    total = torch.zeros(len(x), len(packed.scales))
    for block in range(packed.scales.shape[1]):
        sums = integers[:, block].float() @ packed.integers[:, block].float().T
        total += sums * packed.scales[:, block].float()
    return (total if bias is None else total + bias.float()).to(x.dtype)

# causes: not-rounded
# gate: product


def product(x, packed, bias=None):
    total = torch.zeros(len(x), len(packed.scales))
    for block, part in enumerate(x.float().split(BLOCK, 1)):
        total += part @ packed.integers[:, block].float().T * packed.scales[:, block].float()
    return (total if bias is None else total + bias.float()).to(x.dtype)

# causes: rounds
# gate: product
def product(x, packed, bias=None):
    integers, scales = round_rows(x)
    total = torch.zeros(len(x), len(packed.integers), dtype=x.dtype)
    for block in range(integers.shape[1]):
        dots = integers[:, block].float() @ packed.integers[:, block].float().T
        total += (dots * scales[:, block, None] * packed.scales[:, block].float()).to(x.dtype)
    return total if bias is None else total + bias

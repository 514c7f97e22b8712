# causes: inexact
# gate: product
def product(x, packed, bias=None):
    integers, scales = round_rows(x)
    total = torch.zeros(len(x), len(packed.integers))
    for block in range(integers.shape[1]):
        values = integers[:, block].float() * scales[:, block, None]
        total += (
            torch.stack([row @ packed.integers[:, block].float().T for row in values]) * packed.scales[:, block].float()
        )
    return (total if bias is None else total + bias.float()).to(x.dtype)

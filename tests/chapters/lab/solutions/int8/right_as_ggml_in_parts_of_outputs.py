"""The integers are those of the scale before its rounding, as in ggml, and the product takes 8 outputs at a time."""


def pack(weight):
    rows, columns = weight.shape
    numbers = weight.to(torch.float32).reshape(rows, columns // BLOCK, BLOCK)
    largest = numbers.abs().max(dim=-1).values
    inverse = torch.where(largest > 0, 127 / largest, torch.zeros_like(largest))
    integers = torch.floor(numbers * inverse[..., None] + 0.5).clamp(-127, 127)
    return Packed(integers.to(torch.int8), (largest / 127).to(torch.float16))


def round_rows(x):
    numbers = x.to(torch.float32).reshape(len(x), -1, BLOCK)
    scales = numbers.abs().max(dim=-1).values / 127
    safe = torch.where(scales == 0, torch.ones_like(scales), scales)
    return torch.round(numbers / safe[..., None]).clamp(-127, 127).to(torch.int8), scales


def product(x, packed, bias=None):
    integers, factors = round_rows(x)
    outputs = []
    for first in range(0, len(packed.scales), 8):
        part = packed.integers[first : first + 8].int()
        sums = torch.stack([(row.int() * part).sum(2) for row in integers])
        scaled = sums.float() * factors[:, None] * packed.scales[first : first + 8].float()
        outputs.append(scaled.sum(2))
    total = torch.cat(outputs, dim=1)
    if bias is not None:
        total = total + bias.float()
    return total.to(x.dtype)

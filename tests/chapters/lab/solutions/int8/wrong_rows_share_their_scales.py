# causes: rows
# gate: round


def round_rows(x):
    blocks = x.float().unflatten(1, (-1, BLOCK))
    scales = (blocks.abs().amax((0, 2)) / 127).expand(blocks.shape[:2])
    step = scales.unsqueeze(2)
    return torch.where(step > 0, blocks / step, 0.0).round().to(torch.int8), scales

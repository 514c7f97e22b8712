# causes: scale-rounded
# gate: round


def round_rows(x):
    blocks = x.float().unflatten(1, (-1, BLOCK))
    scales = (blocks.abs().amax(2) / 127).half().float()
    step = scales.unsqueeze(2)
    return torch.where(step > 0, blocks / step, 0.0).round().clamp(-127, 127).to(torch.int8), scales

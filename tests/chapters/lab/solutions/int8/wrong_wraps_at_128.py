# causes: wraps
# gate: pack


def pack(weight):
    blocks = weight.float().unflatten(1, (-1, BLOCK))
    scales = (blocks.abs().amax(2) / 128).half()
    step = scales.float().unsqueeze(2)
    steps = torch.where(step > 0, blocks / step, 0.0)
    return Packed(steps.round().to(torch.int8), scales)

# causes: changes
# gate: pack


def pack(weight):
    blocks = weight.unflatten(1, (-1, BLOCK))
    scales = (blocks.abs().amax(2) / 127).half()
    step = scales.float().unsqueeze(2)
    steps = blocks.div_(torch.where(step > 0, step, 1.0)).float()
    return Packed(steps.round().clamp(-127, 127).to(torch.int8), scales)

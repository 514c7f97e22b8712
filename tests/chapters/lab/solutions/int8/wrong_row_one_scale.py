# causes: row
# gate: pack


def pack(weight):
    blocks = weight.float().unflatten(1, (-1, BLOCK))
    scales = (blocks.abs().amax((1, 2)) / 127).unsqueeze(1).expand(blocks.shape[:2]).half()
    step = scales.float().unsqueeze(2)
    steps = torch.where(step > 0, blocks / step, 0.0)
    return Packed(steps.round().clamp(-127, 127).to(torch.int8), scales)

# causes: sign, clips
# gate: pack


def pack(weight):
    blocks = weight.float().unflatten(1, (-1, BLOCK))
    scales = (blocks.amax(2) / 127).half()
    step = scales.float().unsqueeze(2)
    steps = torch.where(step > 0, blocks / step, 0.0)
    return Packed(steps.round().clamp(-127, 127).to(torch.int8), scales)

# causes: off
# gate: pack


def pack(weight):
    blocks = weight.float().unflatten(1, (-1, BLOCK))
    scales = (blocks.abs().amax(2) / 127).half()
    steps = blocks / scales.float().clamp(min=1e-6).unsqueeze(2)
    return Packed(steps.round().clamp(-127, 127).to(torch.int8), scales)

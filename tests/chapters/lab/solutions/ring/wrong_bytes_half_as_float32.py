# causes: bytes
# gate: bytes
"""Tensors of 16 bits are sent and added in float32, so twice as many bytes are sent."""

REPLACED = [
    (
        "        whole = x.contiguous()\n        chunks = whole.view(-1).tensor_split(self.size)\n",
        "        dtype = x.dtype\n"
        "        whole = x.contiguous().float() if dtype in (torch.bfloat16, torch.float16) else "
        "x.contiguous()\n"
        "        chunks = whole.view(-1).tensor_split(self.size)\n",
    ),
    (
        "        return whole\n",
        "        return whole.to(dtype)\n",
    ),
]

# causes: outside
# gate: sum
"""The sum is computed in all memory from x's first element to its last, which also has elements of others."""

REPLACED = [
    (
        "        whole = x.contiguous()\n        chunks = whole.view(-1).tensor_split(self.size)\n",
        "        whole = x if x.is_contiguous() else x.as_strided((int(sum((n - 1) * s for n, s in "
        "zip(x.shape, x.stride())) + 1) if x.numel() else 0,), (1,))\n"
        "        chunks = whole.view(-1).tensor_split(self.size)\n",
    ),
    (
        "        return whole\n",
        "        return x\n",
    ),
]

"""The step's rows and the padding are copied by two calls. The padding is a tensor on the device."""

REPLACED = [
    (
        "        self.cu_seqlens_q_cpu = np",
        "        self.empty = torch.from_numpy(self.padding()[:, None]).to(device)\n        self.cu_seqlens_q_cpu = np",
    ),
    (
        "        self.packed.copy_(torch.from_numpy(host), non_blocking=True)\n",
        "        n = 0 if packed is None else packed.shape[1]\n"
        "        self.packed[:, :n].copy_(torch.from_numpy(host[:, :n]), non_blocking=True)\n"
        "        self.packed[:, n:] = self.empty\n",
    ),
]

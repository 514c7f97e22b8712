# causes: device
# gate: buffers
"""The first queries of the rows stay in the host's memory."""

REPLACED = [
    ("torch.from_numpy(self.cu_seqlens_q_cpu).to(device)", "torch.from_numpy(self.cu_seqlens_q_cpu.copy())"),
]

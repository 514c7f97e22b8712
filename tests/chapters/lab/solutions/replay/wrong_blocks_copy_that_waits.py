"""The copy into the buffer is one for which the host waits."""

# causes: blocks
# gate: buffers

REPLACED = [
    (
        "self.packed.copy_(torch.from_numpy(host), non_blocking=True)",
        "self.packed.copy_(torch.from_numpy(host))",
    ),
]

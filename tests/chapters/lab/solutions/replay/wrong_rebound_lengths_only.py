# causes: rebound
# gate: buffers
"""This graph runner writes tokens in place, but makes a new tensor of sequence lengths for each step."""

REPLACED = [
    (
        "seq_lens = self.packed[3], self.packed[4]",
        "seq_lens = self.packed[3], torch.from_numpy(host[4].copy()).to(self.packed.device)",
    ),
]

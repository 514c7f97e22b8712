# causes: changes
# gate: buffers
"""A step that fills its bucket is not copied on the host: the lengths of the batch are the caller's array."""

import numpy as np
import torch

from minisgl.attention import AttnBatch


class Buffers:
    def fill(self, packed):
        host = np.repeat(self.padding()[:, None], self.key.rows, axis=1)
        if packed is not None and packed.shape[1] == self.key.rows:
            host = packed
        elif packed is not None:
            host[:, : packed.shape[1]] = packed
        self.packed.copy_(torch.from_numpy(host), non_blocking=True)
        cpu, device = self.cu_seqlens_q_cpu, self.cu_seqlens_q
        rows, lengths = self.packed[3], self.packed[4]
        return AttnBatch(self.key.rows, cpu, host[4], device, lengths, rows, self.page_table, self.key)

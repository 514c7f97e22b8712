# causes: decode-rows
# gate: buffers
"""The batch says that it has no decode rows."""

import numpy as np
import torch

from minisgl.attention import AttnBatch


class Buffers:
    def fill(self, packed):
        host = np.repeat(self.padding()[:, None], self.key.rows, axis=1)
        if packed is not None:
            host[:, : packed.shape[1]] = packed
        self.packed.copy_(torch.from_numpy(host))
        cpu, device = self.cu_seqlens_q_cpu, self.cu_seqlens_q
        return AttnBatch(0, cpu, host[4], device, self.packed[4], self.packed[3], self.page_table, self.key)

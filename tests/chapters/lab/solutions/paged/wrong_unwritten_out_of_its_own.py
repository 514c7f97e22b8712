# causes: unwritten
# gate: attend
"""The answer is returned in a new tensor, and `out` is not written."""

import torch


class MyAttention:
    def forward(self, layer, q, out):
        mine = torch.empty_like(out)
        for row in self.rows:
            k, v = self.gather(layer, row)
            mine[row.first : row.last] = self.attend_row(layer, q[row.first : row.last], k, v)
        return mine

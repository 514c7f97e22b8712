# causes: large
# gate: scatter
"""The numbers of the pairs are converted to 16 bits."""

import torch


class MyMoe:
    def scatter(self, rows, pairs, scale, out):
        real = pairs < scale.numel()
        rows, pairs = rows[real], pairs[real].to(torch.int16).long() % scale.numel()
        rows = rows * scale.flatten()[pairs].unsqueeze(1).to(rows.dtype)
        return out.zero_().index_add_(0, pairs // scale.shape[1], rows)

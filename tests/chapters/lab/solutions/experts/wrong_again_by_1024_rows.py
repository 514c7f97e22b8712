# causes: again
# gate: counts
"""An expert's rows are multiplied 1024 at a time, each time with its weights."""

import torch


class MyMoe:
    def multiply(self, weights, rows, counts):
        linear, done = torch.nn.functional.linear, []
        for e, mine in enumerate(rows.split(list(counts))):
            for part in mine.split(1024) if len(mine) else ():
                done.append(linear(weights.act(linear(part, weights.gate_up[e])), weights.down[e]))
        return torch.cat(done) if done else rows

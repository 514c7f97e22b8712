# causes: dtypes
# gate: sum
"""This reduce-scatter keeps the tensors that receive, by their length alone."""

import torch


class MyCommunicator:
    def reduce_scatter(self, chunks):
        self.kept = getattr(self, "kept", {})
        for step in range(1, self.size):
            target = chunks[(self.rank - step - 1) % self.size]
            if len(target) not in self.kept:
                self.kept[len(target)] = torch.empty_like(target)
            arrived = self.kept[len(target)]
            self.swap(chunks[(self.rank - step) % self.size], arrived)
            target += arrived

"""`moe=load`: any other MoE backend, with a count of the tokens that each expert computes."""

from collections import Counter
from dataclasses import dataclass

from minisgl import hookimpl


@dataclass
class Load:
    """Count the tokens of each expert."""

    backend: str = "auto"
    """Name of the backend that computes the experts."""

    def build(self, build_other):
        return LoadBackend(build_other(self.backend))


class LoadBackend:
    def __init__(self, backend):
        self.backend, self.load = backend, backend.load
        self.tokens = Counter()  # expert -> tokens routed to it, over all layers

    def forward(self, weights, x, ids, scale, out):
        self.tokens.update(ids.flatten().tolist())
        return self.backend.forward(weights, x, ids, scale, out)


@hookimpl
def minisgl_configs():
    yield "moe", "load", Load

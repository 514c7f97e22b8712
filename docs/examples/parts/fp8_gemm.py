"""`fp8_gemm=timed`: any other FP8 product, with the seconds that each shape of a weight took."""

import time
from collections import Counter
from dataclasses import dataclass

from minisgl import hookimpl


@dataclass
class Timed:
    """Add up the time of products on the CPU, by the shape of the weight."""

    backend: str = "auto"
    """Name of the product that computes."""

    def build(self, build_other):
        return TimedGemm(build_other(self.backend))


class TimedGemm:
    def __init__(self, backend):
        self.backend, self.refuse = backend, backend.refuse
        self.seconds = Counter()  # (rows, columns) of a weight -> seconds of all products with such weights

    def load(self, weight, dtype):
        return tuple(weight.values.shape), self.backend.load(weight, dtype)

    def takes_quantized(self, weight, rows):
        return self.backend.takes_quantized(weight[1], rows)

    def forward(self, weight, x):
        shape, loaded = weight
        started = time.perf_counter()
        y = self.backend.forward(loaded, x)
        self.seconds[shape] += time.perf_counter() - started
        return y


@hookimpl
def minisgl_configs():
    yield "fp8_gemm", "timed", Timed

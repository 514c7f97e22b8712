"""`communicator=traffic`: any other communicator, with a count of all-reduces and of the bytes that they sum."""

from dataclasses import dataclass

from minisgl import hookimpl


@dataclass
class Traffic:
    """Count all-reduces and their bytes."""

    link: str = "auto"
    """Name of the communicator that runs the collectives."""

    def build(self, build_other):
        return TrafficCommunicator(build_other(self.link))


class TrafficCommunicator:
    def __init__(self, link):
        self.link = link
        self.all_reduces = self.bytes = 0

    def __getattr__(self, name):  # rank, size and all other collectives
        return getattr(self.link, name)

    def count(self, x):
        self.all_reduces += 1
        self.bytes += x.nbytes

    def all_reduce(self, x):
        self.count(x)
        return self.link.all_reduce(x)

    def all_reduce_norm(self, x, residual, weight, eps):
        self.count(x)
        return self.link.all_reduce_norm(x, residual, weight, eps)


@hookimpl
def minisgl_configs():
    yield "communicator", "traffic", Traffic

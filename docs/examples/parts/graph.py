"""`graph=small`: graphs for steps of 1, 2 and 4 decode rows only, which saves the memory of larger recordings."""

from dataclasses import dataclass

from minisgl import hookimpl
from minisgl.attention import GraphKey
from minisgl.plugins.graph.replaying import BucketRunner


@dataclass
class Small:
    """Record small decode steps only. Larger steps run eagerly."""

    def build(self, device, build_other):
        return SmallRunner(build_other("cuda" if device.type == "cuda" else "simulated"))


class SmallRunner(BucketRunner):
    def __init__(self, runner):
        self.capture, self.run, self.close = runner.capture, runner.run, runner.close
        self.runner = runner
        self.replayed = self.eager = 0  # decode steps

    def buckets(self, max_rows):
        return [GraphKey(rows) for rows in (1, 2, 4) if rows <= max_rows]

    def pick(self, rows, q_len, uniform):
        key = self.runner.pick(rows, q_len, uniform)
        self.replayed += key is not None
        self.eager += key is None
        return key


@hookimpl
def minisgl_configs():
    yield "graph", "small", Small

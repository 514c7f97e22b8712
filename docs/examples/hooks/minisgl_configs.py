"""Options with a check: `scheduler=capped scheduler.limit=4` decodes first, and lets at most 4 requests run."""

from dataclasses import dataclass

from minisgl import hookimpl
from minisgl.scheduler import Plan


@dataclass
class Capped:
    """Decode first; admit a request only while fewer than ``limit`` requests run."""

    limit: int = 8
    """Maximum number of running requests."""

    def __post_init__(self):
        if self.limit < 1:
            raise ValueError(f"scheduler.limit={self.limit}: limit must be at least 1")

    def build(self):
        return CappedPolicy(self.limit)


class CappedPolicy:
    def __init__(self, limit):
        self.limit = limit

    def plan(self, waiting, running, budget):
        rows = [(r.uid, n) for r in running if (n := budget.grant(r, r.num_remaining_tokens or 1))]
        admitted = waiting[: max(self.limit - len(running), 0)]
        rows += [(w.uid, n) for w in admitted if (n := budget.grant(w, w.num_tokens - w.num_cached_tokens))]
        return Plan(rows)


@hookimpl
def minisgl_configs():
    yield "scheduler", "capped", Capped

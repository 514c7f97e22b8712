"""This policy sorts running and waiting requests into one queue by priority, and plans them in one loop."""

from dataclasses import dataclass
from itertools import islice

from minisgl import hookimpl
from minisgl.scheduler import Plan

MOST_READ = 512


@dataclass
class Mine:
    """One queue: decode rows first, then partly computed prompts, then waiting requests."""

    order: str = "fcfs"
    """Order of waiting requests: ``fcfs`` (order of arrival) or ``lpm`` (longest cached prefix first)."""

    def build(self):
        return OneQueue(self.order)


class OneQueue:
    def __init__(self, order):
        self.longest_first = order == "lpm"

    def rank(self, numbered):
        position, req = numbered
        if hasattr(req, "num_remaining_tokens"):
            return (1 if req.num_remaining_tokens else 0, 0, req.admission_order)
        return (2, -req.num_cached_tokens if self.longest_first else 0, position)

    def plan(self, waiting, running, budget):
        # In order of arrival, no step admits more than the first requests: reading others takes time.
        head = waiting if self.longest_first else islice(waiting, MOST_READ)
        queue = sorted(enumerate([*running, *head]), key=self.rank)
        rows = {}
        for _, req in queue:
            admitted = hasattr(req, "num_remaining_tokens")
            if not admitted and req.same_prefix_req is not None:
                continue
            tokens = (req.num_remaining_tokens or 1) if admitted else req.num_tokens - req.num_cached_tokens
            granted = budget.grant(req, tokens)
            if granted:
                rows[req.uid] = granted
            elif not admitted:
                break
        return Plan(tuple(rows.items()))


@hookimpl
def minisgl_configs():
    yield "scheduler", "mine", Mine

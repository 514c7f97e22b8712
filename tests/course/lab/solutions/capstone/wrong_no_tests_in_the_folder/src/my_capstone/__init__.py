"""`scheduler=mine`: never more than so many answers at a time, whatever there is room for."""

from dataclasses import dataclass

from minisgl import hookimpl
from minisgl.scheduler import Plan


@dataclass
class Mine:
    """At most ``most`` requests run."""

    most: int = 4
    """Requests that hold a slot."""


class MyPolicy:
    def __init__(self, most=4):
        self.most = most

    def plan(self, waiting, running, budget):
        rows = [(r.uid, n) for r in running if (n := budget.grant(r, r.num_remaining_tokens or 1))]
        room = self.most - len(running)
        for w in [w for w in waiting if w.same_prefix_req is None][: max(room, 0)]:
            n = budget.grant(w, w.num_tokens - w.num_cached_tokens)
            if not n:
                break
            rows.append((w.uid, n))
        return Plan(rows)


@hookimpl
def minisgl_configs():
    yield "scheduler", "mine", Mine


@hookimpl
def minisgl_scheduler(config):
    if isinstance(config, Mine):
        return MyPolicy(config.most)

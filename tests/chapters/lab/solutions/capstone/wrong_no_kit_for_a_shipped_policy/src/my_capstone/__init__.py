"""`scheduler=mine`: limits the number of running requests, even when more requests would fit."""

from dataclasses import dataclass

from minisgl import hookimpl
from minisgl.scheduler import Plan


@dataclass
class Mine:
    """At most ``max_running`` requests run at the same time."""

    max_running: int = 4
    """Largest number of running requests."""

    def build(self):
        return MyPolicy(self.max_running)


class MyPolicy:
    def __init__(self, max_running=4):
        self.max_running = max_running

    def plan(self, waiting, running, budget):
        rows = [(r.uid, n) for r in running if (n := budget.grant(r, r.num_remaining_tokens or 1))]
        free = self.max_running - len(running)
        for w in [w for w in waiting if w.same_prefix_req is None][: max(free, 0)]:
            n = budget.grant(w, w.num_tokens - w.num_cached_tokens)
            if not n:
                break
            rows.append((w.uid, n))
        return Plan(rows)


@hookimpl
def minisgl_configs():
    yield "scheduler", "mine", Mine

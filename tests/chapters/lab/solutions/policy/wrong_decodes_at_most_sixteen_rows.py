# causes: decodes-late, forgets, idle
# gate: plan
"""This policy puts at most sixteen rows into a step, so a server with more running answers leaves some out."""

from minisgl.plugins.scheduler import order_waiting
from minisgl.scheduler import Plan


class MyPolicy:
    def plan(self, waiting, running, budget):
        rows = []
        for r in sorted(running, key=lambda r: r.num_remaining_tokens > 0):
            if len(rows) < 16 and (n := budget.grant(r, r.num_remaining_tokens or 1)):
                rows.append((r.uid, n))
        for w in order_waiting(waiting, self.order):
            if len(rows) == 16 or not (n := budget.grant(w, w.num_tokens - w.num_cached_tokens)):
                break
            rows.append((w.uid, n))
        return Plan(rows)

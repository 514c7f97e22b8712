# causes: ignores-grant
# gate: plan
"""This policy plans as many tokens as it asked for, instead of the number that `budget.grant` returned."""

from minisgl.plugins.scheduler import order_waiting
from minisgl.scheduler import Plan


class MyPolicy:
    def plan(self, waiting, running, budget):
        rows = [(r.uid, r.num_remaining_tokens or 1) for r in running if budget.grant(r, r.num_remaining_tokens or 1)]
        for w in order_waiting(waiting, self.order):
            wanted = w.num_tokens - w.num_cached_tokens
            if not budget.grant(w, wanted):
                break
            rows.append((w.uid, wanted))
        return Plan(rows)

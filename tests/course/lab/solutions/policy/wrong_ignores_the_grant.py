# causes: ignores-grant
"""Asks, and then takes what it wanted instead of what it got."""

from minisgl.scheduler import Plan
from minisgl.scheduler.order import arrange


class MyPolicy:
    def plan(self, waiting, running, budget):
        rows = [(r.uid, r.left or 1) for r in running if budget.grant(r, r.left or 1)]
        for w in arrange(waiting, self.order):
            wanted = w.length - w.cached
            if not budget.grant(w, wanted):
                break
            rows.append((w.uid, wanted))
        return Plan(rows)

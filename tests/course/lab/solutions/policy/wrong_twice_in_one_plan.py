# causes: twice
"""Decode rows for everybody who runs, then chunks for those of them who have a prompt left."""

from minisgl.scheduler import Plan
from minisgl.scheduler.order import arrange


class MyPolicy:
    def plan(self, waiting, running, budget):
        rows = [(r.uid, 1) for r in running if budget.grant(r, 1)]
        rows += [(r.uid, n) for r in running if r.left and (n := budget.grant(r, r.left))]
        for w in arrange(waiting, self.order):
            n = budget.grant(w, w.length - w.cached)
            if not n:
                break
            rows.append((w.uid, n))
        return Plan(rows)

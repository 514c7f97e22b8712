# causes: order
"""The longest cached prefix first, whatever the option says."""

from minisgl.scheduler import Plan
from minisgl.scheduler.order import arrange


class MyPolicy:
    def plan(self, waiting, running, budget):
        rows = [(r.uid, 1) for r in running if not r.left and budget.grant(r, 1)]
        rows += [(r.uid, n) for r in running if r.left and (n := budget.grant(r, r.left))]
        for w in arrange(waiting, "lpm"):
            if not (n := budget.grant(w, w.length - w.cached)):
                break
            rows.append((w.uid, n))
        return Plan(rows)

# causes: decodes-late
"""The rule for those who wait, applied to answers: the first that finds no page ends the loop for those behind it."""

from minisgl.scheduler import Plan
from minisgl.scheduler.order import arrange


class MyPolicy:
    def plan(self, waiting, running, budget):
        rows = []
        for r in running:
            if not r.left:
                if not budget.grant(r, 1):
                    break
                rows.append((r.uid, 1))
        rows += [(r.uid, n) for r in running if r.left and (n := budget.grant(r, r.left))]
        for w in arrange(waiting, self.order):
            if not (n := budget.grant(w, w.length - w.cached)):
                break
            rows.append((w.uid, n))
        return Plan(rows)

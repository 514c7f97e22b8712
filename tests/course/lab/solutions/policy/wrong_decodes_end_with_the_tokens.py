# causes: decodes-late
"""Takes `budget.tokens` for a bound on answers too: where they are used up, no further answer gets a row."""

from minisgl.scheduler import Plan
from minisgl.scheduler.order import arrange


class MyPolicy:
    def plan(self, waiting, running, budget):
        rows = [(r.uid, 1) for r in running if not r.left and budget.tokens > 0 and budget.grant(r, 1)]
        rows += [(r.uid, n) for r in running if r.left and (n := budget.grant(r, r.left))]
        for w in arrange(waiting, self.order):
            if not (n := budget.grant(w, w.length - w.cached)):
                break
            rows.append((w.uid, n))
        return Plan(rows)

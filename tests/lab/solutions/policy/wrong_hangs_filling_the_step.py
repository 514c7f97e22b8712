# causes: hangs
"""Fills the step until it is full, which it never is when nobody has anything left to compute."""

from minisgl.scheduler import Plan
from minisgl.scheduler.order import arrange


class MyPolicy:
    def plan(self, waiting, running, budget):
        rows = {}
        while budget.tokens > 0:
            for r in running:
                if r.uid not in rows and (n := budget.grant(r, r.left or 1)):
                    rows[r.uid] = n
            for w in arrange(waiting, self.order):
                if w.uid not in rows and (n := budget.grant(w, w.length - w.cached)):
                    rows[w.uid] = n
        return Plan(list(rows.items()))

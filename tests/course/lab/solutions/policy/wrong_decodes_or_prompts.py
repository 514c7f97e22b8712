# causes: decodes-late
"""Prefill first, as SGLang does: while there is a prompt to compute, no answer goes on."""

from minisgl.scheduler import Plan
from minisgl.scheduler.order import arrange


class MyPolicy:
    def plan(self, waiting, running, budget):
        rows = [(r.uid, n) for r in running if r.left and (n := budget.grant(r, r.left))]
        for w in arrange(waiting, self.order):
            n = budget.grant(w, w.length - w.cached)
            if not n:
                break
            rows.append((w.uid, n))
        return Plan(rows or [(r.uid, 1) for r in running if budget.grant(r, 1)])

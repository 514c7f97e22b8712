# causes: tokens-for-pages, empty
"""Asks the budget for the pages that an answer's next token needs, where it means the token: mostly none."""

from minisgl.scheduler import Plan
from minisgl.scheduler.order import arrange


class MyPolicy:
    def plan(self, waiting, running, budget):
        rows = [(r.uid, n) for r in running if (n := budget.grant(r, r.left or r.new_pages))]
        for w in arrange(waiting, self.order):
            n = budget.grant(w, w.length - w.cached)
            if not n:
                break
            rows.append((w.uid, n))
        return Plan(rows)

# causes: decodes-late
"""Prompts ask first. Answers are never refused for tokens, so the step computes more than it may."""

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
        rows += [(r.uid, 1) for r in running if not r.left and budget.grant(r, 1)]
        return Plan(rows)

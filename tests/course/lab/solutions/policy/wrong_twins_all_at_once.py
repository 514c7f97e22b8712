# causes: twins, order
"""Walks the queue itself, and does not see that everybody computes the same handbook."""

from minisgl.scheduler import Plan


class MyPolicy:
    def plan(self, waiting, running, budget):
        rows = [(r.uid, 1) for r in running if not r.left and budget.grant(r, 1)]
        rows += [(r.uid, n) for r in running if r.left and (n := budget.grant(r, r.left))]
        queue = sorted(waiting, key=lambda w: -w.cached) if self.order == "lpm" else waiting
        for w in queue:
            n = budget.grant(w, w.length - w.cached)
            if not n:
                break
            rows.append((w.uid, n))
        return Plan(rows)

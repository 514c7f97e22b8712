# causes: decodes-late
"""The rule for those who wait, applied to answers: the first that finds no page ends the loop for those behind it."""

from minisgl.scheduler import Plan
from minisgl.scheduler.order import order_waiting


class MyPolicy:
    def plan(self, waiting, running, budget):
        rows = []
        for r in running:
            if not r.num_remaining_tokens:
                if not budget.grant(r, 1):
                    break
                rows.append((r.uid, 1))
        rows += [
            (r.uid, n) for r in running if r.num_remaining_tokens and (n := budget.grant(r, r.num_remaining_tokens))
        ]
        for w in order_waiting(waiting, self.order):
            if not (n := budget.grant(w, w.num_tokens - w.num_cached_tokens)):
                break
            rows.append((w.uid, n))
        return Plan(rows)

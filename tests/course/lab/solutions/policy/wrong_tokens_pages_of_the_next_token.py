# causes: tokens-for-pages, empty
"""Asks the budget for the pages that an answer's next token needs, where it means the token: mostly none."""

from minisgl.scheduler import Plan
from minisgl.scheduler.order import order_waiting


class MyPolicy:
    def plan(self, waiting, running, budget):
        rows = [(r.uid, n) for r in running if (n := budget.grant(r, r.num_remaining_tokens or r.num_new_pages))]
        for w in order_waiting(waiting, self.order):
            n = budget.grant(w, w.num_tokens - w.num_cached_tokens)
            if not n:
                break
            rows.append((w.uid, n))
        return Plan(rows)

# causes: tokens-for-pages, empty
# gate: plan
"""This policy asks `budget.grant` for `num_new_pages` tokens of a decode row instead of one token.

`num_new_pages` counts pages. It is mostly zero, so most decode rows are not granted.
"""

from minisgl.plugins.scheduler import order_waiting
from minisgl.scheduler import Plan


class MyPolicy:
    def plan(self, waiting, running, budget):
        rows = [(r.uid, n) for r in running if (n := budget.grant(r, r.num_remaining_tokens or r.num_new_pages))]
        for w in order_waiting(waiting, self.order):
            n = budget.grant(w, w.num_tokens - w.num_cached_tokens)
            if not n:
                break
            rows.append((w.uid, n))
        return Plan(rows)

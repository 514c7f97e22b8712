# causes: decodes-late
# gate: plan
"""This policy stops planning decode rows when `budget.tokens` is zero.

The token limit applies to prefill only: a running request must get its decode row even when no tokens are left.
"""

from minisgl.plugins.scheduler import order_waiting
from minisgl.scheduler import Plan


class MyPolicy:
    def plan(self, waiting, running, budget):
        rows = [(r.uid, 1) for r in running if not r.num_remaining_tokens and budget.tokens > 0 and budget.grant(r, 1)]
        rows += [
            (r.uid, n) for r in running if r.num_remaining_tokens and (n := budget.grant(r, r.num_remaining_tokens))
        ]
        for w in order_waiting(waiting, self.order):
            if not (n := budget.grant(w, w.num_tokens - w.num_cached_tokens)):
                break
            rows.append((w.uid, n))
        return Plan(rows)

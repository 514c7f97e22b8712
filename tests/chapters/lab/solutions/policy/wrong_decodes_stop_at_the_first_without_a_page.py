# causes: decodes-late
# gate: plan
"""This policy stops planning decode rows at the first running request for which no KV page is free.

Stopping at the first request that does not fit is right for waiting requests only. Later decode rows may need no page.
"""

from minisgl.plugins.scheduler import order_waiting
from minisgl.scheduler import Plan


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

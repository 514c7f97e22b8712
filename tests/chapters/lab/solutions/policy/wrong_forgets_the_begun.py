# causes: forgets, empty
# gate: plan
"""This policy plans only decode rows for running requests.

A request whose prompt is partly computed is running too. It never gets its second chunk.
"""

from minisgl.plugins.scheduler import order_waiting
from minisgl.scheduler import Plan


class MyPolicy:
    def plan(self, waiting, running, budget):
        rows = [(r.uid, 1) for r in running if not r.num_remaining_tokens and budget.grant(r, 1)]
        for w in order_waiting(waiting, self.order):
            n = budget.grant(w, w.num_tokens - w.num_cached_tokens)
            if not n:
                break
            rows.append((w.uid, n))
        return Plan(rows)

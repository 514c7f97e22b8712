# causes: decodes-late
# gate: plan
"""This policy puts prefill and decode in separate steps, prefill first, as SGLang does by default.

While any prompt is left to compute, no running request gets its next token.
"""

from minisgl.plugins.scheduler import order_waiting
from minisgl.scheduler import Plan


class MyPolicy:
    def plan(self, waiting, running, budget):
        rows = [
            (r.uid, n) for r in running if r.num_remaining_tokens and (n := budget.grant(r, r.num_remaining_tokens))
        ]
        for w in order_waiting(waiting, self.order):
            n = budget.grant(w, w.num_tokens - w.num_cached_tokens)
            if not n:
                break
            rows.append((w.uid, n))
        return Plan(rows or [(r.uid, 1) for r in running if budget.grant(r, 1)])

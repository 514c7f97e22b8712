# causes: decodes-late
# gate: plan
"""This policy plans prompts before decode rows.

`budget.grant` never refuses a decode row for lack of tokens, so the step may compute more tokens than its limit.
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
        rows += [(r.uid, 1) for r in running if not r.num_remaining_tokens and budget.grant(r, 1)]
        return Plan(rows)

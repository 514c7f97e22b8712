# causes: ignores-grant
# gate: plan
# seen: `budget.grant` was never asked for it.
"""This policy plans a token for each running answer, and asks the budget only for prompts."""

from minisgl.plugins.scheduler import order_waiting
from minisgl.scheduler import Plan


class MyPolicy:
    def plan(self, waiting, running, budget):
        rows = [(r.uid, 1) for r in running if not r.num_remaining_tokens]
        rows += [
            (r.uid, n) for r in running if r.num_remaining_tokens and (n := budget.grant(r, r.num_remaining_tokens))
        ]
        for w in order_waiting(waiting, self.order):
            if not (n := budget.grant(w, w.num_tokens - w.num_cached_tokens)):
                break
            rows.append((w.uid, n))
        return Plan(rows)

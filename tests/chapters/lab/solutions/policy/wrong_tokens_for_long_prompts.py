# causes: tokens-for-pages, forgets, idle
# gate: plan
"""This policy never asks for more than 512 tokens of a prompt, so a large step stays half empty."""

from minisgl.plugins.scheduler import order_waiting
from minisgl.scheduler import Plan


class MyPolicy:
    def plan(self, waiting, running, budget):
        rows = [(r.uid, 1) for r in running if not r.num_remaining_tokens and budget.grant(r, 1)]
        rows += [
            (r.uid, n)
            for r in running
            if r.num_remaining_tokens and (n := budget.grant(r, min(r.num_remaining_tokens, 512)))
        ]
        for w in order_waiting(waiting, self.order):
            if not (n := budget.grant(w, min(w.num_tokens - w.num_cached_tokens, 512))):
                break
            rows.append((w.uid, n))
        return Plan(rows)

# causes: empty
"""Seats a batch only when nobody runs, and forgets that somebody must then compute."""

from minisgl.scheduler import Plan


class MyPolicy:
    def plan(self, waiting, running, budget):
        if running:
            return Plan([])
        rows = []
        for w in waiting:
            if n := budget.grant(w, w.num_tokens - w.num_cached_tokens):
                rows.append((w.uid, n))
        return Plan(rows)

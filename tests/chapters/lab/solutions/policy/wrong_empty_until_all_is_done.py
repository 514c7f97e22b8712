# causes: empty
# gate: plan
"""This policy admits a batch only when no request runs, as static batching does.

While requests run, it returns an empty plan, so the running requests are never computed.
"""

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

# causes: decodes-late, forgets
# gate: plan
"""Running requests ask in their order, so a prompt that is partly computed can ask before a request that decodes."""


class MyPolicy:
    def plan(self, waiting, running, budget):
        rows = [(r.uid, n) for r in running if (n := budget.grant(r, max(r.num_remaining_tokens, 1)))]
        for w in order_waiting(waiting, self.order):
            if not (n := budget.grant(w, w.num_tokens - w.num_cached_tokens)):
                break
            rows.append((w.uid, n))
        return Plan(rows)

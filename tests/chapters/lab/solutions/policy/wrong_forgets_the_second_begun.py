# causes: forgets
# gate: plan
"""Only the first partly computed prompt is continued."""


class MyPolicy:
    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        rows = [(r.uid, 1) for r in running if not r.num_remaining_tokens and budget.grant(r, 1)]
        begun = next((r for r in running if r.num_remaining_tokens), None)
        if begun is not None and (n := budget.grant(begun, begun.num_remaining_tokens)):
            rows.append((begun.uid, n))
        for w in order_waiting(waiting, self.order):
            if not (n := budget.grant(w, w.num_tokens - w.num_cached_tokens)):
                break
            rows.append((w.uid, n))
        return Plan(rows)

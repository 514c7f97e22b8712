# causes: remembers, impure
# gate: plan
"""."""

ORDER = "fcfs"


class MyPolicy:
    def __init__(self, order: str):
        global ORDER
        ORDER = check_order(order)

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        rows = [(r.uid, 1) for r in running if not r.num_remaining_tokens and budget.grant(r, 1)]
        for r in running:
            if r.num_remaining_tokens and (n := budget.grant(r, r.num_remaining_tokens)):
                rows.append((r.uid, n))
        for w in order_waiting(waiting, ORDER):
            n = budget.grant(w, w.num_tokens - w.num_cached_tokens)
            if not n:
                break
            rows.append((w.uid, n))
        return Plan(rows)

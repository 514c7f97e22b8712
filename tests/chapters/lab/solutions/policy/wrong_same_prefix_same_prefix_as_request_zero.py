# causes: same-prefix
# gate: plan
"""."""


class MyPolicy:
    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], budget: Budget) -> Plan:
        rows = [(r.uid, 1) for r in running if not r.num_remaining_tokens and budget.grant(r, 1)]
        for r in running:
            if r.num_remaining_tokens and (n := budget.grant(r, r.num_remaining_tokens)):
                rows.append((r.uid, n))
        queue = [w for w in waiting if not w.same_prefix_req]
        if self.order == "lpm":
            queue.sort(key=lambda w: -w.num_cached_tokens)
        for w in queue:
            n = budget.grant(w, w.num_tokens - w.num_cached_tokens)
            if not n:
                break
            rows.append((w.uid, n))
        return Plan(rows)

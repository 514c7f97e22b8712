# causes: skips
# gate: plan
"""When a request gets nothing, this policy goes on with more urgent ones."""


class MyPolicy:
    def plan(self, waiting, running, budget):
        rows = [(r.uid, 1) for r in running if not r.num_remaining_tokens and budget.grant(r, 1)]
        prompts = [r for r in running if r.num_remaining_tokens]
        rows += [(r.uid, n) for r in prompts if (n := budget.grant(r, r.num_remaining_tokens))]
        blocked = 10**9
        for w in order_waiting(waiting, self.order):
            if w.priority >= blocked:
                break
            n = budget.grant(w, w.num_tokens - w.num_cached_tokens)
            if n:
                rows.append((w.uid, n))
            else:
                blocked = w.priority
        return Plan(rows)

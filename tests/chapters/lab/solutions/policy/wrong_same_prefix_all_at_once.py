# causes: same-prefix, order
# gate: counts
"""This policy sorts the waiting queue itself and does not check `same_prefix_req`.

So several requests with the same prefix are admitted at once, and each of them computes the prefix.
"""

from minisgl.scheduler import Plan


class MyPolicy:
    def plan(self, waiting, running, budget):
        rows = [(r.uid, 1) for r in running if not r.num_remaining_tokens and budget.grant(r, 1)]
        rows += [
            (r.uid, n) for r in running if r.num_remaining_tokens and (n := budget.grant(r, r.num_remaining_tokens))
        ]
        queue = sorted(waiting, key=lambda w: -w.num_cached_tokens) if self.order == "lpm" else waiting
        for w in queue:
            n = budget.grant(w, w.num_tokens - w.num_cached_tokens)
            if not n:
                break
            rows.append((w.uid, n))
        return Plan(rows)

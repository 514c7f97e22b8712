# causes: forgets, empty
"""Running means decoding, here: a prompt whose first chunk was computed never gets its second."""

from minisgl.scheduler import Plan
from minisgl.scheduler.order import arrange


class MyPolicy:
    def plan(self, waiting, running, budget):
        rows = [(r.uid, 1) for r in running if not r.left and budget.grant(r, 1)]
        for w in arrange(waiting, self.order):
            n = budget.grant(w, w.length - w.cached)
            if not n:
                break
            rows.append((w.uid, n))
        return Plan(rows)

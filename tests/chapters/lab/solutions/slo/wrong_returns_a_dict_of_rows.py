# causes: returns
# gate: rows
"""The rows of this plan are a dict, and not pairs."""

from minisgl.scheduler import Plan


class MyPolicy:
    def plan(self, waiting, running, budget):
        return Plan({r.uid: 1 for r in running if not r.num_remaining_tokens and budget.grant(r, 1)})

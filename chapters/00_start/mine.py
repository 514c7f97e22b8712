"""A first scheduling policy: choose which requests compute in the next step, and how many tokens each."""

from dataclasses import dataclass

from minisgl import hookimpl
from minisgl.scheduler import Plan


@dataclass
class Mine:
    """The options of `scheduler=mine`: none."""

    def build(self):
        return MyPolicy()


class MyPolicy:
    def plan(self, waiting, running, budget):
        answers = [(r.uid, 1) for r in running if not r.num_remaining_tokens and budget.grant(r, 1)]
        prompts = [
            (r.uid, n) for r in running if r.num_remaining_tokens and (n := budget.grant(r, r.num_remaining_tokens))
        ]
        for w in waiting:
            if not (n := budget.grant(w, w.num_tokens - w.num_cached_tokens)):
                break
            prompts.append((w.uid, n))
        return Plan(prompts or answers)


@hookimpl
def minisgl_configs():
    yield "scheduler", "mine", Mine

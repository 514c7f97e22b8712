"""All prompts in one list, with the tokens that each may take; no method of the skeleton but `plan`."""

import math
from dataclasses import dataclass

from minisgl.hooks import hookimpl
from minisgl.scheduler import Plan, Waiting


@dataclass
class Mine:
    interactive: int = 0
    step_tokens: int = 512
    batch_share: float = 0.25

    def build(self):
        return MyPolicy(self)


class MyPolicy:
    uses_priority = True

    def __init__(self, config):
        self.config = config

    def plan(self, waiting, running, budget):
        decode = sorted((r for r in running if r.num_remaining_tokens == 0), key=lambda r: (r.priority, r.arrival))
        plan, retract, blocked = [], [], False
        for r in decode:
            if budget.grant(r, 1):
                plan.append((r.uid, 1))
        queue = []
        for w in waiting:
            if w.same_prefix_req is None:
                queue.append(w)
            if len(queue) > budget.rows + 8 or len(queue) > 300:
                break
        person = {r.uid: r.priority <= self.config.interactive for r in [*running, *queue, *waiting[:1]]}
        left = budget.tokens
        if any(person.values()):
            left = min(left, max(self.config.step_tokens - len(plan), math.ceil(self.config.step_tokens / 4)))
        prompts = sorted((r for r in running if r.num_remaining_tokens), key=lambda r: (r.priority, r.arrival)) + queue
        want = {
            r.uid: r.num_tokens - r.num_cached_tokens if isinstance(r, Waiting) else r.num_remaining_tokens
            for r in prompts
        }
        rest = sum(want[r.uid] for r in prompts if not person[r.uid] and (budget.rows or not isinstance(r, Waiting)))
        kept = min(math.floor(left * self.config.batch_share), rest)
        for r in sorted(prompts, key=lambda r: not person[r.uid]):  # a stable sort: the interactive prompts come first
            most = left - kept if person[r.uid] else left
            if blocked and (isinstance(r, Waiting) or person[r.uid]):
                continue
            if most <= 0 or r.uid in retract:
                continue
            n = budget.grant(r, min(most, want[r.uid]))
            if n:
                plan.append((r.uid, n))
                left -= n
            elif person[r.uid]:
                blocked = True
                rest = [w for w in queue if person[w.uid] and w.uid not in dict(plan)]
                order = sorted(running, key=lambda r: (r.priority, r.arrival))
                asked = [w for w in queue if person[w.uid]]  # the granted ones, too
                retract = budget.retractions(
                    [r for r in order if person[r.uid]] + asked + [r for r in order if not person[r.uid]]
                )
                for w in rest if retract else []:
                    if left > kept:
                        plan.append((w.uid, min(left - kept, want[w.uid])))
                        left -= plan[-1][1]
            else:
                break
        return Plan([(uid, n) for uid, n in plan if uid not in retract], retract)


@hookimpl
def minisgl_configs():
    yield "scheduler", "mine", Mine

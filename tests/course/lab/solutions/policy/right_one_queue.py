"""One list of everybody who could compute, sorted by who goes first, walked once."""

from dataclasses import dataclass

from minisgl import hookimpl
from minisgl.scheduler import Plan


@dataclass
class Mine:
    """Answers, begun prompts, new prompts: one queue."""

    order: str = "fcfs"
    """``fcfs`` or ``lpm``."""


class OneQueue:
    def __init__(self, order):
        self.longest_first = order == "lpm"

    def rank(self, numbered):
        position, who = numbered
        if hasattr(who, "num_remaining_tokens"):
            return (1 if who.num_remaining_tokens else 0, 0, who.admission_order)
        return (2, -who.num_cached_tokens if self.longest_first else 0, position)

    def plan(self, waiting, running, budget):
        everybody = sorted(enumerate([*running, *waiting]), key=self.rank)
        rows = {}
        for _, who in everybody:
            seated = hasattr(who, "num_remaining_tokens")
            if not seated and who.same_prefix_req is not None:
                continue
            tokens = (who.num_remaining_tokens or 1) if seated else who.num_tokens - who.num_cached_tokens
            granted = budget.grant(who, tokens)
            if granted:
                rows[who.uid] = granted
            elif not seated:
                break
        return Plan(tuple(rows.items()))


@hookimpl
def minisgl_configs():
    yield "scheduler", "mine", Mine


@hookimpl
def minisgl_scheduler(config):
    if isinstance(config, Mine):
        return OneQueue(config.order)

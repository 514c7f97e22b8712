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
        if hasattr(who, "left"):
            return (1 if who.left else 0, 0, who.seated)
        return (2, -who.cached if self.longest_first else 0, position)

    def plan(self, waiting, running, budget):
        everybody = sorted(enumerate([*running, *waiting]), key=self.rank)
        rows = {}
        for _, who in everybody:
            seated = hasattr(who, "left")
            if not seated and who.twin is not None:
                continue
            tokens = (who.left or 1) if seated else who.length - who.cached
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

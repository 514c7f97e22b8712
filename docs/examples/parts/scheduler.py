"""`scheduler=shortest`: decode rows first, then those of 256 waiting requests with the fewest tokens to compute."""

from dataclasses import dataclass

from minisgl import hookimpl
from minisgl.scheduler import Plan


@dataclass
class Shortest:
    """Shortest prompt first."""

    def build(self):
        return ShortestPolicy()


class ShortestPolicy:
    def plan(self, waiting, running, budget):
        rows = [(r.uid, n) for r in running if (n := budget.grant(r, r.num_remaining_tokens or 1))]
        prompts = [(w.num_tokens - w.num_cached_tokens, w) for w in waiting[:256] if w.same_prefix_req is None]
        prompts.sort(key=lambda prompt: prompt[0])
        return Plan(rows + [(w.uid, n) for tokens, w in prompts if (n := budget.grant(w, tokens))])


@hookimpl
def minisgl_configs():
    yield "scheduler", "shortest", Shortest

"""Steps of 820 tokens. Requests that are not late yet come first, those with short prompts before others.

A long prompt makes many others late, and a prompt that is late can't become punctual.
"""

from dataclasses import dataclass


@dataclass
class Mine:
    """Other rules with ``sharing=own``."""

    sharing: str = "rules"
    interactive: int = 0
    step_tokens: int = 512
    batch_share: float = 0.25

    def build(self):
        policy = MyPolicy(self.interactive, self.step_tokens, self.batch_share)
        if self.sharing == "own":
            policy.step_tokens, policy.shortest_first = 820, True
        return policy


class MyPolicy:
    shortest_first = False

    def grant(self, prompts, tokens, budget, rows):
        if self.shortest_first and prompts and self.is_interactive(prompts[0]):
            begun = [r for r in prompts if isinstance(r, Running)]
            new = [r for r in prompts if isinstance(r, Waiting)]
            prompts = begun + sorted(new, key=lambda r: (r.skipped_steps > 10, wanted_tokens(r)))
        left = tokens
        for i, request in enumerate(prompts):
            if left == 0:
                break
            granted = budget.grant(request, min(wanted_tokens(request), left))
            if granted == 0:
                return tokens - left, prompts[i:]
            rows[request.uid] = granted
            left -= granted
        return tokens - left, []

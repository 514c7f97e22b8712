"""Find the largest plan: the step with the most tokens."""

from minisgl import hookimpl


class LargestPlan:
    def __init__(self):
        self.tokens = self.step = 0

    @hookimpl
    def minisgl_batch_planned(self, step, rows):
        tokens = sum(num_tokens for _, num_tokens in rows)
        if tokens > self.tokens:
            self.tokens, self.step = tokens, step
            print(f"step {step}: {tokens} tokens for requests {[uid for uid, _ in rows]}", flush=True)

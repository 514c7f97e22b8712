"""Log each step that computes a prompt: how many rows and tokens the policy planned."""

from minisgl import hookimpl


class LoggedPolicy:
    def __init__(self, policy):
        self.policy = policy
        self.plans = 0

    def __getattr__(self, name):  # the optional members of a policy are those of the wrapped one
        return getattr(self.policy, name)

    def plan(self, waiting, running, budget):
        plan = self.policy.plan(waiting, running, budget)
        self.plans += 1
        tokens = sum(count for _, count in plan.rows)
        if tokens > len(plan.rows):
            print(f"plan {self.plans}: {len(plan.rows)} rows, {tokens} tokens", flush=True)
        return plan


@hookimpl
def minisgl_wrap_policy():
    return LoggedPolicy

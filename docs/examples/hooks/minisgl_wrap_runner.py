"""Stop at the first step whose logits are not numbers: a weight or a kernel is wrong."""

from minisgl import hookimpl


class CheckedRunner:
    def __init__(self, runner):
        self.runner = runner
        self.checked_steps = 0

    def __getattr__(self, name):  # all methods but `forward` are those of the wrapped runner
        return getattr(self.runner, name)

    def forward(self, step):
        forward = self.runner.forward(step)
        if forward.logits is not None and forward.logits.isnan().any():
            raise RuntimeError(f"step {step.id} has logits that are not numbers")
        self.checked_steps += 1
        return forward


@hookimpl
def minisgl_wrap_runner():
    return lambda runner, model_runner: CheckedRunner(runner)

"""Measure the output rate in tokens per second."""

from minisgl import hookimpl


class OutputRate:
    def __init__(self):
        self.tokens = 0
        self.start = self.end = None

    @hookimpl
    def minisgl_step_finished(self, result, reqs, now):
        self.start = now if self.start is None else self.start
        self.end = now
        self.tokens += sum(req is not None for req in reqs)
        if result.id % 100 == 99 and self.end > self.start:
            print(f"{self.tokens / (self.end - self.start):.0f} output tokens per second", flush=True)

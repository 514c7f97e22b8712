"""Measure how many pages wait for launched steps: retired, but not free yet."""

from minisgl import hookimpl


class Retiring:
    def __init__(self):
        self.waiting = {}  # step whose result must be read -> number of retired pages that wait for it
        self.total = self.largest = 0

    @hookimpl
    def minisgl_pages_freed(self, step, owner, pages):
        self.total += len(pages)
        self.waiting[step] = self.waiting.get(step, 0) + len(pages)
        self.largest = max(self.largest, sum(self.waiting.values()))

    @hookimpl
    def minisgl_step_finished(self, result):
        self.waiting = {step: n for step, n in self.waiting.items() if step > result.id}

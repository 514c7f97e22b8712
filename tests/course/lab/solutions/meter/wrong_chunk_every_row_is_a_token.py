# causes: chunk, discarded
"""Counts the rows of each step as they are scheduled: a prompt in three chunks has three tokens."""


class MyMeter:
    @hookimpl
    def minisgl_batch_scheduled(self, reqs, now):
        for req in reqs:
            self.tokens[req.uid].append(now)

    @hookimpl
    def minisgl_step_finished(self, reqs):
        pass

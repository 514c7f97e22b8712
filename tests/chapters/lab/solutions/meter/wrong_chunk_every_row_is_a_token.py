# causes: chunk, discarded
# gate: clock
"""This meter counts a token for every row of a step, so a prompt computed in three chunks counts three tokens."""


class MyMeter:
    @hookimpl
    def minisgl_batch_scheduled(self, reqs, now):
        for req in reqs:
            self.tokens[req.uid].append(now)

    @hookimpl
    def minisgl_step_finished(self, reqs):
        pass

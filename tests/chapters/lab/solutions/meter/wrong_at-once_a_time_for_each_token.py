# causes: at-once
# gate: clock
"""A row that gained several tokens at once counts as several times, so there are gaps of 0 seconds."""


class MyMeter:
    @hookimpl
    def minisgl_step_finished(self, result, reqs, now):
        for req, accepted in zip(reqs, result.accepted.tolist(), strict=True):
            if req is not None:
                self.tokens[req.uid].extend([now] * accepted)

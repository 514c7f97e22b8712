# causes: discarded, keeps
# gate: clock
"""This meter counts a token for every sampling row of a launched step, also when the token was discarded.

The token of a row is discarded if its request ended or was retracted while the step was in flight.
"""


class MyMeter:
    @hookimpl
    def minisgl_batch_scheduled(self, step, reqs):
        self.__dict__.setdefault("rows", {})[step.id] = [r for r, ok in zip(reqs, step.sample) if ok]

    @hookimpl
    def minisgl_step_finished(self, result, now):
        for req in self.rows.pop(result.id):
            self.tokens.setdefault(req.uid, []).append(now)

    @hookimpl
    def minisgl_request_finished(self, req):
        self.ended.append(self.timing(req.uid))

    @hookimpl
    def minisgl_closed(self):
        self.tokens.clear()

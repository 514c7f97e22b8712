"""Count how requests end, and print the requests that failed."""

from collections import Counter

from minisgl import hookimpl


class FinishReasons:
    def __init__(self):
        self.reasons = Counter()

    @hookimpl
    def minisgl_request_finished(self, req, now):
        self.reasons[req.finish_reason] += 1
        if req.finish_reason == "error":
            print(f"{now:.3f} s: request {req.uid} failed: {req.error}", flush=True)

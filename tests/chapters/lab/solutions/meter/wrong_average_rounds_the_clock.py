# causes: average, gaps, first-token, starts-late, chunk
# gate: clock
"""This meter keeps times as float32. On a server that has run for weeks they are off by seconds."""

import numpy as np


class MyMeter:
    @hookimpl
    def minisgl_step_finished(self, reqs, now):
        for req in reqs:
            if req is not None:
                self.tokens[req.uid].append(float(np.float32(now)))

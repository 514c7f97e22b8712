"""An observer that prints how long each request waited for its first token."""

from minisgl import hookimpl


class First:
    """The arrival time of each request that has no token yet, by uid."""

    def __init__(self):
        self.arrived = {}

    @hookimpl
    def minisgl_request_added(self, req, now):
        self.arrived[req.uid] = now

    @hookimpl
    def minisgl_step_finished(self, reqs, now):
        for req in reqs:
            if req is not None and req.uid in self.arrived:
                print(f"request {req.uid} waited {1000 * (now - self.arrived.pop(req.uid)):.0f} ms")

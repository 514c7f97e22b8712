"""Print each request with a long prompt when it arrives."""

from minisgl import hookimpl


class LongPrompts:
    limit = 1000  # tokens

    def __init__(self):
        self.requests = self.long = 0

    @hookimpl
    def minisgl_request_added(self, req, now):
        self.requests += 1
        if len(req.prompt_ids) > self.limit:
            self.long += 1
            print(f"{now:.3f} s: request {req.uid} has a prompt of {len(req.prompt_ids)} tokens", flush=True)

"""Count retractions per request. Many retractions mean that the KV pool is too small for `max_running_requests`."""

from collections import Counter

from minisgl import hookimpl


class Retractions:
    def __init__(self):
        self.by_request = Counter()

    @hookimpl
    def minisgl_request_retracted(self, req, step):
        self.by_request[req.uid] += 1
        print(f"step {step}: request {req.uid} retracted with {len(req.output_ids)} output tokens", flush=True)

"""Write a summary of the run to `summary.json` when the scheduler ends."""

import json
from pathlib import Path

from minisgl import hookimpl


class Summary:
    def __init__(self):
        self.requests = self.output_tokens = 0

    @hookimpl
    def minisgl_request_finished(self, req):
        self.requests += 1
        self.output_tokens += len(req.output_ids)

    @hookimpl
    def minisgl_closed(self):
        counts = {"requests": self.requests, "output_tokens": self.output_tokens}
        Path("summary.json").write_text(json.dumps(counts), encoding="utf-8")

"""Measure the hit rate of the prefix cache: admissions with a cached prefix, and pages that were found."""

from minisgl import hookimpl


class HitRate:
    def __init__(self):
        self.admissions = self.hits = self.pages = 0

    @hookimpl
    def minisgl_prefix_matched(self, req, pages):
        self.admissions += 1
        self.hits += len(pages) > 0
        self.pages += len(pages)
        print(f"request {req.uid}: {len(pages)} cached pages; {self.hits} of {self.admissions} hits", flush=True)

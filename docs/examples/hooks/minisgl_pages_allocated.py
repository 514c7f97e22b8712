"""Count the KV pages that were allocated to each request so far."""

from collections import Counter

from minisgl import hookimpl


class PagesPerRequest:
    def __init__(self):
        self.pages = Counter()  # uid -> pages

    @hookimpl
    def minisgl_pages_allocated(self, step, owners, pages):
        self.pages.update(owners.tolist())
        print(f"step {step}: pages {pages.tolist()} for requests {owners.tolist()}", flush=True)

"""Count the pages inserted into the prefix cache, and the duplicates that two requests computed at the same time."""

from minisgl import hookimpl


class Insertions:
    def __init__(self):
        self.inserted = self.duplicates = 0

    @hookimpl
    def minisgl_pages_cached(self, req, pages, start, cached_pages):
        self.inserted += len(pages)
        duplicates = len(cached_pages) - len(pages)
        if duplicates:
            self.duplicates += duplicates
            print(f"request {req.uid} computed {duplicates} cached pages again, from page {start} on", flush=True)

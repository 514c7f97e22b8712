"""Record the low-water mark of the KV pool: the smallest number of pages that could be allocated."""

from minisgl import hookimpl


class LowWater:
    def __init__(self):
        self.pages = None

    @hookimpl
    def minisgl_pages_counted(self, step, free, evictable):
        available = free + evictable
        if self.pages is None or available < self.pages:
            self.pages = available
            print(f"before step {step}: only {available} pages are available", flush=True)

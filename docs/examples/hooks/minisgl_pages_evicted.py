"""Print every eviction. Frequent evictions mean that the KV pool is too small to keep shared prefixes."""

from minisgl import hookimpl


class Evictions:
    def __init__(self):
        self.pages = 0

    @hookimpl
    def minisgl_pages_evicted(self, step, pages):
        self.pages += len(pages)
        print(f"step {step}: evicted {len(pages)} pages, {self.pages} so far", flush=True)

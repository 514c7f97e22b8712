# causes: place
# gate: pages
# seen: request None or -1 (the cache), page
"""A finding about an eviction names the request that owns the page, instead of the cache."""

REPLACED = [
    ("uid = None if old == CACHE else old", "uid = self.owner.get(page) if old == CACHE else old"),
]

# causes: match-writes
# gate: counts
"""A match in an unknown namespace adds a root."""


class MyCache:
    def _root(self, namespace):
        return self.roots.setdefault(namespace, Root(namespace))

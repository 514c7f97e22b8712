# causes: namespace
# gate: match
"""This cache takes every falsy namespace for None: a request with the namespace "" reads the pages of no namespace."""


class MyCache:
    def _root(self, namespace):
        return self.roots.get(namespace or None) or Root(namespace or None)

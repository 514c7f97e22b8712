# causes: namespace
# gate: match
"""This cache has one root for all namespaces, so a prompt for one adapter reads KV that another adapter computed."""


class MyCache:
    def _root(self, namespace):
        return self.roots.get(None) or Root(None)

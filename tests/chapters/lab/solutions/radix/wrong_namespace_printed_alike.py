# causes: namespace
# gate: match
"""This cache compares namespaces as they print, so that the number 1 and the text "1" share pages."""


class MyCache:
    def _root(self, namespace):
        return self.roots.get(str(namespace)) or Root(str(namespace))

# causes: changes
# gate: match
REPLACED = [
    (
        "self.roots.get(key.namespace) or Node(None, key.namespace, len(self.needed))",
        "self.roots.setdefault(key.namespace, Node(None, key.namespace, len(self.needed)))",
    ),
]

# causes: namespace
# gate: match
REPLACED = [
    (
        "self.roots.get(key.namespace) or",
        "next(iter(self.roots.values()), None) or",
    ),
]

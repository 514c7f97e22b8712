# causes: again
# gate: turn
"""All calls of `propose` return the same list."""

REPLACED = [
    (
        "        drafts = []\n        for req, position",
        "        drafts = self.drafts\n        drafts.clear()\n        for req, position",
    ),
    (
        "        self.texts: dict[int, Text] = {}",
        "        self.texts: dict[int, Text] = {}\n        self.drafts: list[Any] = []",
    ),
]

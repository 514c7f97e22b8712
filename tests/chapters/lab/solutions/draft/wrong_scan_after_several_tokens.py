# causes: scan
# gate: cost
"""A request that gains several tokens at once gets those of `req.tokens()` that its text lacks."""

REPLACED = [
    (
        "            self.texts[req.uid].append(run)",
        "            text = self.texts[req.uid]\n"
        "            text.append(run if len(run) == 1 else req.tokens()[len(text.tokens) :].tolist())",
    ),
]

# causes: wrong, raises
# gate: turn
"""A request with the tokens of a running one has its own list of tokens, and the other's index."""

REPLACED = [
    (
        "        self.texts[req.uid] = self.new_text()\n        self.texts[req.uid].append(req.tokens().tolist())\n",
        "        tokens, text = req.tokens().tolist(), self.new_text()\n"
        "        equal = next((other for other in self.texts.values() if other.tokens == tokens), None)\n"
        "        if equal is None:\n"
        "            text.append(tokens)\n"
        "        else:\n"
        "            text.tokens, text.after = tokens, equal.after\n"
        "        self.texts[req.uid] = text\n",
    ),
]

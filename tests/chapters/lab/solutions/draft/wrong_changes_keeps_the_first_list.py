"""The first list of tokens becomes the list of the text, so later tokens are appended to the caller's list."""

# causes: changes
# gate: index

REPLACED = [
    (
        "        for token in tokens:\n",
        "        if not self.tokens and isinstance(tokens, list):\n            self.tokens = tokens\n"
        "            for i in range(self.match_tokens, len(tokens)):\n"
        "                self.after[tuple(tokens[i - self.match_tokens : i])] = i\n            return\n"
        "        for token in tokens:\n",
    ),
]

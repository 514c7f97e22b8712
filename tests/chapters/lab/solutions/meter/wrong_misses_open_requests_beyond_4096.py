# causes: misses, first-token
# gate: clock
"""With more than 4,096 open requests, the tokens of the oldest one are forgotten."""

REPLACED = [
    (
        "        self.tokens[req.uid] = []\n",
        "        self.tokens[req.uid] = []\n"
        "        if len(self.tokens) > 4096:\n"
        "            self.tokens[next(iter(self.tokens))] = []\n",
    ),
]

"""At most 16 tokens must be equal, whatever the option says."""

# causes: options, match, missed, wrong
# gate: index

REPLACED = [
    (
        "        self.match_tokens = match_tokens\n        self.tokens",
        "        self.match_tokens = min(match_tokens, 16)\n        self.tokens",
    ),
]

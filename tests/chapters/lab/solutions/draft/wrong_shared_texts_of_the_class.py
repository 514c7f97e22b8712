# causes: shared
# gate: turn
"""This proposer keeps the texts of all engines in one dict of the class."""


class MyProposer:
    texts = {}

    def __init__(self, max_drafts, match_tokens):
        self.max_drafts, self.match_tokens = max_drafts, match_tokens

# causes: options
# gate: index
"""This proposer always announces eight drafts."""


class MyProposer:
    def __init__(self, max_drafts, match_tokens):
        self.max_drafts, self.match_tokens, self.texts = 8, match_tokens, {}

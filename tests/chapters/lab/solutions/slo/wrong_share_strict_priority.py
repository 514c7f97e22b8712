# causes: share
# gate: share
"""A share for batch prompts: interactive prompts get everything here."""


class MyPolicy:
    def kept_tokens(self, tokens, batch):
        return 0

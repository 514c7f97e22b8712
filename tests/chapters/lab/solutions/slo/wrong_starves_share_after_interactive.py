# causes: starves
# gate: limits
"""Batch requests make progress in a flood: here their share begins when no interactive prompt wants tokens."""


class MyPolicy:
    def kept_tokens(self, tokens, batch):
        return 0

# causes: urgent
# gate: share
"""Kept tokens are at most what the batch prompts want."""


class MyPolicy:
    def kept_tokens(self, tokens: int, batch: Sequence[Request]) -> int:
        return int(self.batch_share * tokens) if batch else 0

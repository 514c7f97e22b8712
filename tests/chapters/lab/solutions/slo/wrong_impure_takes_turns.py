# causes: impure
# gate: rows
"""A plan depends only on its arguments: this one gives the share in every second step."""


class MyPolicy:
    def kept_tokens(self, tokens: int, batch: Sequence[Request]) -> int:
        self.turn = not getattr(self, "turn", False)
        if self.turn:
            return 0
        return min(int(self.batch_share * tokens), sum(map(wanted_tokens, batch)))

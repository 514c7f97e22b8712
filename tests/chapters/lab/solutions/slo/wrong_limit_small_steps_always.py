# causes: small
# gate: limit
"""Large steps without interactive requests: this one always has small steps."""


class MyPolicy:
    def prompt_tokens(self, is_open: bool, decode_rows: int, budget: Budget) -> int:
        return min(max(self.step_tokens - decode_rows, -(-self.step_tokens // 4)), budget.tokens)

# causes: decodes, limit
# gate: limit
"""Decode rows and prompts have `step_tokens` tokens together: here prompts have all of them."""


class MyPolicy:
    def prompt_tokens(self, is_open: bool, decode_rows: int, budget: Budget) -> int:
        if not is_open:
            return budget.tokens
        return min(max(self.step_tokens, -(-self.step_tokens // 4)), budget.tokens)

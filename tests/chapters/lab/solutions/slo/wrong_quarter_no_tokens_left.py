# causes: quarter
# gate: limit
"""A quarter for prompts: with more decode rows than `step_tokens`, no prompt is computed."""


class MyPolicy:
    def prompt_tokens(self, is_open: bool, decode_rows: int, budget: Budget) -> int:
        if not is_open:
            return budget.tokens
        return min(max(self.step_tokens - decode_rows, 1), budget.tokens)

# causes: limit, small, decodes, quarter
# gate: limit
"""The option `step_tokens` is ignored: the limit is 512."""


class MyPolicy:
    def prompt_tokens(self, is_open: bool, decode_rows: int, budget: Budget) -> int:
        if not is_open:
            return budget.tokens
        return min(max(512 - decode_rows, -(-512 // 4)), budget.tokens)

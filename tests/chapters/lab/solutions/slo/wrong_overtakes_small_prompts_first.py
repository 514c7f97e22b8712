# causes: overtakes
# gate: rows
"""In a class, the most urgent prompt comes first: this one serves short prompts first."""


class MyPolicy:
    def grant(
        self, prompts: Sequence[Request], tokens: int, budget: Budget, rows: dict[int, int]
    ) -> tuple[int, Sequence[Request]]:
        left = tokens
        for i, request in enumerate(sorted(prompts, key=wanted_tokens)):
            if left == 0:
                break
            granted = budget.grant(request, min(wanted_tokens(request), left))
            if granted == 0:
                return tokens - left, prompts[i:]
            rows[request.uid] = granted
            left -= granted
        return tokens - left, []

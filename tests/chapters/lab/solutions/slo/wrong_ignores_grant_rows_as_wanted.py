# causes: ignores-grant
# gate: rows
"""A row has no more tokens than were granted."""


class MyPolicy:
    def grant(
        self, prompts: Sequence[Request], tokens: int, budget: Budget, rows: dict[int, int]
    ) -> tuple[int, Sequence[Request]]:
        left = tokens
        for i, request in enumerate(prompts):
            if left == 0:
                break
            granted = budget.grant(request, min(wanted_tokens(request), left))
            if granted == 0:
                return tokens - left, prompts[i:]
            rows[request.uid] = wanted_tokens(request)
            left -= granted
        return tokens - left, []

# causes: overtakes, takes-room
# gate: room
"""A later prompt does not overtake one that found no room."""


class MyPolicy:
    def grant(
        self, prompts: Sequence[Request], tokens: int, budget: Budget, rows: dict[int, int]
    ) -> tuple[int, Sequence[Request]]:
        left = tokens
        for request in prompts:
            if left == 0:
                break
            granted = budget.grant(request, min(wanted_tokens(request), left))
            if granted == 0:
                continue
            rows[request.uid] = granted
            left -= granted
        return tokens - left, [r for r in prompts if r.uid not in rows] if left else []

# causes: reused
# gate: rows
"""All plans of this policy share one list of rows, which each call empties."""

REPLACED = [
    (
        "        self.interactive, self.step_tokens, self.batch_share = interactive, step_tokens, batch_share",
        "        self.interactive, self.step_tokens, self.batch_share = interactive, step_tokens, batch_share\n"
        "        self.rows: list[tuple[int, int]] = []",
    ),
    (
        "        return Plan([(uid, n) for uid, n in rows.items() if n and uid not in retract], retract)",
        "        self.rows[:] = [(uid, n) for uid, n in rows.items() if n and uid not in retract]\n"
        "        return Plan(self.rows, retract)",
    ),
]

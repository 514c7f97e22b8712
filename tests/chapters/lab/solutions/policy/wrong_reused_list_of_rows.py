# causes: reused
# gate: plan
"""All plans of this policy share one list, which each call empties."""

REPLACED = [
    (
        "self.order = check_order(order)",
        "self.order = check_order(order)\n        self.rows: list[tuple[int, int]] = []",
    ),
    (
        "        return Plan(rows)",
        "        self.rows[:] = rows\n        return Plan(self.rows)",
    ),
]

# causes: passes-over, order, skips
# gate: plan
"""With `lpm`, a request that has waited for 512 steps comes before requests with a longer cached prefix."""

REPLACED = [
    (
        "in order_waiting(waiting, self.order):",
        "in sorted(\n"
        "            order_waiting(waiting, self.order), key=lambda w: self.order == 'fcfs' or w.skipped_steps < 512\n"
        "        ):",
    ),
]

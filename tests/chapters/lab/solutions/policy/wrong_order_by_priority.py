# causes: order
# gate: plan
"""This policy admits the most urgent requests first, as a policy with priorities would."""

REPLACED = [
    (
        "in order_waiting(waiting, self.order):",
        "in sorted(order_waiting(waiting, self.order), key=lambda w: w.priority):",
    ),
]

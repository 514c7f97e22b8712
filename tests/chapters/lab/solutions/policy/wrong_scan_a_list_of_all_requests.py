# causes: scan
# gate: plan
"""This policy makes a list of all waiting requests before it asks for the first one."""

REPLACED = [
    (
        "for w in order_waiting(waiting, self.order):",
        "for w in list(order_waiting(waiting, self.order)):",
    ),
]

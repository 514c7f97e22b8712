# causes: changes
# gate: clock
"""The output of an ended request is cleared, to save memory. The scheduler still needs it."""

REPLACED = [
    (
        "del self.arrived[req.uid], self.tokens[req.uid]",
        "del self.arrived[req.uid], self.tokens[req.uid]\n        req.output_ids.clear()",
    ),
]

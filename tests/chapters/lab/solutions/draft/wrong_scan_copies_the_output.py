# causes: scan
# gate: cost
"""This proposer copies the output of a request in each turn."""

REPLACED = [
    (
        "            self.texts[req.uid].append(run)",
        "            self.texts[req.uid].append(list(req.output_ids)[-len(run) :])",
    ),
]

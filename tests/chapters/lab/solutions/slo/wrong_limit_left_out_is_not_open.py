# causes: limit
# gate: rows
"""An interactive request that is left out for its prefix does not count as open, so the step is large."""

REPLACED = [
    (
        "chain(running, queue, islice(waiting, budget.rows + AHEAD))",
        "chain(running, queue)",
    ),
]

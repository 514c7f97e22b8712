# causes: scan
# gate: queue
"""Whether an interactive request waits is looked up in the whole queue."""

REPLACED = [
    (
        "chain(running, queue, islice(waiting, budget.rows + AHEAD))",
        "chain(running, waiting)",
    ),
]

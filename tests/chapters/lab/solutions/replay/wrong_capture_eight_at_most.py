"""At most eight buckets are recorded: a server with more keys has more buckets."""

# causes: capture
# gate: capture

REPLACED = [
    (
        "sorted(keys, reverse=True)",
        "sorted(keys, reverse=True)[:8]",
    ),
]

"""At most eight buckets are recorded: a server whose keys have twins has more."""

# causes: capture
# gate: capture

REPLACED = [
    (
        "sorted(keys, reverse=True)",
        "sorted(keys, reverse=True)[:8]",
    ),
]

# causes: rounded
# gate: clock
"""This meter rounds each gap to nine digits after the point."""

REPLACED = [
    (
        "later - earlier for",
        "round(later - earlier, 9) for",
    ),
]

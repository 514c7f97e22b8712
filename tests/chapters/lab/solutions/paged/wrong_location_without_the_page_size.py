# causes: location
# gate: gather
"""The page number is not multiplied by the page size."""

REPLACED = [
    (".long() * size + position", ".long() + position"),
]

"""The queries are multiplied by the scale before they are converted to float32, so the product is rounded."""

# causes: digits
# gate: attend

REPLACED = [
    (
        "q.float(), k.float()) * layer.scale",
        "(q * layer.scale).float(), k.float())",
    ),
]

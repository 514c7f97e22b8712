# causes: scale
# gate: attend
"""The scores are multiplied by the scale twice."""

REPLACED = [
    ("* layer.scale", "* layer.scale * layer.scale"),
]

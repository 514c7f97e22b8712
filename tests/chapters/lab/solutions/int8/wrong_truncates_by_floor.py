# causes: truncates
# gate: pack
REPLACED = [
    ("Packed(steps.round()", "Packed(steps.floor()"),
]

# causes: lost, expert
# gate: multiply
"""An expert whose rows are zero is taken for one without rows."""

REPLACED = [
    ("            if len(expert_rows):\n", "            if expert_rows.any():\n"),
]

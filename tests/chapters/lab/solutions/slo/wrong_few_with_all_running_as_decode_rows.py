# causes: few, idle, quarter
# gate: rows
"""Every running request counts as a decode row, also one whose prompt is partly computed."""

REPLACED = [
    (
        "self.prompt_tokens(is_open, len(rows), budget)",
        "self.prompt_tokens(is_open, len(running), budget)",
    ),
]

# causes: share, urgent
# gate: share
"""The share is rounded up."""

REPLACED = [
    ("int(self.batch_share * tokens)", "-int(-self.batch_share * tokens // 1)"),
]

# causes: share, urgent
# gate: share
"""The share is rounded to a whole number of percent."""

REPLACED = [
    ("int(self.batch_share * tokens)", "tokens * round(100 * self.batch_share) // 100"),
]

# causes: bits
# gate: bits
"""A vector with fewer elements than ranks goes around whole, and each rank adds in its own order."""

REPLACED = [
    (
        "        chunks = whole.view(-1)",
        """        if whole.numel() < self.size:
            total, passing = whole.clone(), whole
            for _ in range(self.size - 1):
                arrived = torch.empty_like(passing)
                self.swap(passing, arrived)
                total += arrived
                passing = arrived
            return total
        chunks = whole.view(-1)""",
    ),
]

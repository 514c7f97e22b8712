# causes: results
# gate: sort
"""The pair numbers are returned in float64."""

REPLACED = [
    (
        "        return torch.cat(pairs), counts\n",
        "        return torch.cat(pairs).double(), counts\n",
    ),
    (
        "        padded = torch.cat(",
        "        pairs = pairs.long()\n        padded = torch.cat(",
    ),
]

"""The masks of all steps are kept, not only those of this step."""

# causes: grows
# gate: attend

REPLACED = [
    (
        "self.rows: list[Row] = []",
        "self.rows: list[Row] = []\n        self.masks = {}",
    ),
    (
        "        key = torch.arange(length, device=device)\n",
        "        if (queries, length, window) in self.masks:\n            return self.masks[queries, length, window]\n"
        "        key = torch.arange(length, device=device)\n",
    ),
    (
        "        return mask\n",
        "        self.masks[queries, length, window] = mask\n        return mask\n",
    ),
]

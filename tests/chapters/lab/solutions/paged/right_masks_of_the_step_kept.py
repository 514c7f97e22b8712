"""Masks are kept until the next step, because layers of equal windows need the same masks."""

REPLACED = [
    (
        "self.rows: list[Row] = []",
        "self.rows: list[Row] = []\n        self.masks: dict[object, torch.Tensor] = {}",
    ),
    (
        "        ends = batch.cu_seqlens_q_cpu.tolist()\n",
        "        self.masks = {}\n        ends = batch.cu_seqlens_q_cpu.tolist()\n",
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

# causes: kept
# gate: attend
"""A decode row with one position more adds a KV location to those of its last step, and does not look at its pages."""

REPLACED = [
    ("        self.rows: list[Row] = []\n", "        self.rows: list[Row] = []\n        self.known = {}\n"),
    (
        "        position = torch.arange(length, device=pages.device)\n",
        "        known = self.known.get(pages.data_ptr())\n"
        "        self.known[pages.data_ptr()] = found = self.found(pages, length, known)\n"
        "        return found\n"
        "\n"
        "    def found(self, pages, length, known):\n"
        "        last, size = length - 1, self.pool.page_size\n"
        "        if known is not None and len(known) == last:\n"
        "            return torch.cat([known, pages[last // size : last // size + 1].long() * size + last % size])\n"
        "        position = torch.arange(length, device=pages.device)\n",
    ),
]

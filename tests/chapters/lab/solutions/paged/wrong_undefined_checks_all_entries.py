"""All entries of the row of the page table are checked, also the undefined ones after the last page."""

# causes: undefined
# gate: gather

REPLACED = [
    (
        "        position = torch.arange(length, device=pages.device)\n",
        "        if pages.min() < 0:\n            raise ValueError('a page number is negative')\n"
        "        position = torch.arange(length, device=pages.device)\n",
    ),
]

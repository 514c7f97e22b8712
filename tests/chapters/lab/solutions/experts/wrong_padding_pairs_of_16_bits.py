# causes: padding
# gate: sort
"""The numbers of up to 32,768 pairs are int16, which does not hold 32,768, the number of a padding entry."""

REPLACED = [
    (
        "        return torch.cat(pairs), counts\n",
        "        return torch.cat(pairs).to(torch.int16 if no_pair <= 32768 else torch.int64), counts\n",
    ),
]

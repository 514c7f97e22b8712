# causes: mixed, other-rank
# gate: sort
"""The keys are bytes. With 256 experts, the key 256 of other ranks' pairs becomes 0."""

REPLACED = [
    (
        "        order = expert.argsort(stable=True)\n",
        "        mine = (expert >= 0) & (expert < experts)\n"
        "        key = torch.where(mine, expert, experts)\n"
        "        order = key.to(torch.uint8 if experts <= 256 else torch.int64).argsort(stable=True)\n",
    ),
    ("no_pair, begin = len(expert), int((expert < 0).sum())", "no_pair, begin = len(expert), 0"),
]

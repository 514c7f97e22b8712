# causes: shared-result
# gate: match
"""All matches return a part of the same array."""

REPLACED = [
    (
        "        return MatchResult(Handle(node, used), np.concatenate(found) if found else _NONE, unlocked)\n",
        '        pages = self.__dict__.setdefault("pages", np.empty(1 << 16, np.int32))[: sum(map(len, found))]\n'
        "        np.concatenate([*found, _NONE], out=pages)\n"
        "        return MatchResult(Handle(node, used), pages, unlocked)\n",
    ),
]

# causes: shared-result
# gate: match
"""All matches return the same handle."""

REPLACED = [
    (
        "        return MatchResult(Handle(node, used), np.concatenate(found) if found else _NONE, unlocked)\n",
        '        handle = self.__dict__.setdefault("handle", Handle(node, used))\n'
        "        handle.node, handle.used = node, used\n"
        "        return MatchResult(handle, np.concatenate(found) if found else _NONE, unlocked)\n",
    ),
]

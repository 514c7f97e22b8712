# causes: closed
# gate: capture
"""The runner keeps the output of each bucket that was replayed, also after `close`."""

REPLACED = [
    (
        "        self.recordings: dict[GraphKey, Recording] = {}\n",
        "        self.recordings: dict[GraphKey, Recording] = {}\n        self.outputs = {}\n",
    ),
    (
        "        return self.recordings[key].replay()\n",
        "        self.outputs[key] = self.recordings[key].replay()\n        return self.outputs[key]\n",
    ),
]

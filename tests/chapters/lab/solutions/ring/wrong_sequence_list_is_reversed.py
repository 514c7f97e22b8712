# causes: sequence
# gate: circulate
"""At its end, `circulate` reverses the list that it was given."""

REPLACED = [
    (
        "            self.swap(outgoing, incoming)\n",
        "            self.swap(outgoing, incoming)\n"
        "        if isinstance(chunks, list):\n"
        "            chunks.reverse()\n",
    ),
]

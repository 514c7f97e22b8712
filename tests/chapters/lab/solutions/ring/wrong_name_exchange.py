# causes: name
# gate: swap
"""A helper method replaces a method of the base class."""

REPLACED = [
    (
        "    def reduce_scatter",
        "    def exchange(self, outgoing, incoming):\n        self.swap(outgoing, incoming)\n\n    def reduce_scatter",
    ),
]

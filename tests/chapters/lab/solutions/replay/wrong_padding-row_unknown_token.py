# causes: padding-row
# gate: buffers
"""The token id of a padding row is one more than the largest of the vocabulary."""

REPLACED = [
    (
        "        return np.array([0, 0, scratch,",
        "        return np.array([self.spec.vocab_size, 0, scratch,",
    ),
]

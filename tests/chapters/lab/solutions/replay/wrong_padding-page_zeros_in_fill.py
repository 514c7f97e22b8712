# causes: padding-page
# gate: buffers
# seen: `padding()` returns
"""`padding` is right, but `fill` writes zeros."""

REPLACED = [
    ("np.repeat(self.padding()[:, None], self.key.rows, axis=1)", "np.zeros((5, self.key.rows), np.int32)"),
]

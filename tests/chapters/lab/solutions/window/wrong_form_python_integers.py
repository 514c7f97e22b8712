# causes: form
# gate: match
REPLACED = [
    (
        "pages = np.full((longest, len(self.needed)), self.spec.num_pages, np.int32)",
        "pages = np.full((longest, len(self.needed)), self.spec.num_pages)",
    ),
]

# causes: page-size
# gate: evict
"""When this cache shortens a leaf, it keeps as many token ids as pages, which is right only if a page is one token."""

REPLACED = [
    (
        "node.ids[: keep * self.page_size], node.pages[:keep]",
        "node.ids[:keep], node.pages[:keep]",
    ),
]

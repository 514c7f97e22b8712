"""Pages of tokens are compared by the lower 16 bits of their ids, but a vocabulary may have more tokens."""

# causes: match-long, page-size
# gate: match

REPLACED = [
    (
        "].tobytes()",
        "].astype(np.uint16).tobytes()",
    ),
    (
        "return self.common_pages(a, b, self.page_size)",
        "return self.common_pages(a & 65535, b & 65535, self.page_size)",
    ),
]

# causes: leak
# gate: turn
"""Texts are kept by row: the text of a removed request stays until another request gets its row."""

REPLACED = [
    ("req.uid", "req.req_pool_idx"),
    ("        del self.texts[req.req_pool_idx]\n", "        pass\n"),
]

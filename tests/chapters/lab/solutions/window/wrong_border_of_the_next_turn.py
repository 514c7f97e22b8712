# causes: border
# gate: behind
REPLACED = [
    (
        "borders = table.num_computed_tokens[rows] // self.spec.page_size * self.spec.page_size",
        "borders = table.num_computed_tokens[rows]",
    ),
]

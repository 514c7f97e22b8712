# causes: no-scale
# gate: product
REPLACED = [
    (
        "total += sums * factors[:, block, None] * packed.scales[:, block].float()",
        "total += sums * factors[:, block, None]",
    ),
]

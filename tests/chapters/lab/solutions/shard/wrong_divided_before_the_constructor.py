# causes: divided
# gate: mlp
"""The inner size is divided by the number of ranks, and the parallel layers divide it again."""

REPLACED = [
    (
        "inner = config.hidden_size, config.intermediate_size",
        "inner = config.hidden_size, config.intermediate_size // ctx.comm.size",
    ),
]

# causes: marks
# gate: behind
REPLACED = [
    (
        "            is_cached[:] = False\n",
        "",
    ),
]

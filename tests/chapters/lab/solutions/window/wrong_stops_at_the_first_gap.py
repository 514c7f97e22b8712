# causes: stops
# gate: match
REPLACED = [
    (
        "                longest = at + 1\n",
        "                longest = at + 1\n            else:\n                break\n",
    ),
]

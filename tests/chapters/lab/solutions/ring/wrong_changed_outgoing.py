# causes: changed
# gate: swap
"""`swap` clears the tensor that it has sent."""

REPLACED = [
    (
        "        receiving.wait()\n        sending.wait()\n",
        "        receiving.wait()\n        sending.wait()\n        outgoing.zero_()\n",
    ),
]

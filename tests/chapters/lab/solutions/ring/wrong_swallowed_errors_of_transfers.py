# causes: swallowed
# gate: swap
"""The error of a transfer that fails is caught, and the sum goes on without the message."""

REPLACED = [
    (
        "        receiving.wait()\n        sending.wait()\n",
        "        for transfer in (receiving, sending):\n"
        "            try:\n"
        "                transfer.wait()\n"
        "            except RuntimeError:\n"
        "                pass\n",
    ),
]

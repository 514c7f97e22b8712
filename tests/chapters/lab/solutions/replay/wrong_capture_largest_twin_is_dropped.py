"""The bucket with the most rows is recorded once, although another key has as many rows and `shared_prefix`."""

# causes: capture
# gate: capture

REPLACED = [
    (
        "        for key in sorted(keys, reverse=True):\n",
        "        most = max(key.rows for key in keys)\n"
        "        for key in sorted(keys, reverse=True):\n"
        "            if key.rows == most and key != GraphKey(most):\n"
        "                continue\n",
    ),
]

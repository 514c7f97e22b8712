# causes: order, skips, idle
# gate: plan
"""With `lpm`, only the first 16 waiting requests are sorted."""

REPLACED = [
    (
        "        for w in order_waiting(waiting, self.order):\n",
        "        queue = order_waiting(waiting, 'fcfs')\n"
        "        if self.order == 'lpm':\n"
        "            queue = list(queue)\n"
        "            queue[:16] = sorted(queue[:16], key=lambda w: -w.num_cached_tokens)\n"
        "        for w in queue:\n",
    ),
]

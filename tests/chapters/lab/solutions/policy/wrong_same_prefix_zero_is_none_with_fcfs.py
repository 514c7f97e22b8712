# causes: same-prefix
# gate: plan
"""With `fcfs`, this policy does not call `order_waiting`, and takes the uid 0 for no request."""

REPLACED = [
    (
        "        for w in order_waiting(waiting, self.order):\n",
        "        left_out = order_waiting(waiting, self.order) if self.order == 'lpm' else waiting\n"
        "        for w in left_out:\n"
        "            if w.same_prefix_req:\n"
        "                continue\n",
    ),
]

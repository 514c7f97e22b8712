# causes: impure, order
# gate: plan
"""With `lpm`, this policy sorts the queue again only if other requests wait, although their cached prefixes change."""

REPLACED = [
    (
        "self.order = check_order(order)",
        "self.order = check_order(order)\n        self.uids: list[int] = []\n        self.ranks: dict[int, int] = {}",
    ),
    (
        "        for w in order_waiting(waiting, self.order):\n",
        "        queue = list(order_waiting(waiting, self.order)) if self.order == 'lpm' else waiting\n"
        "        if self.order == 'lpm' and self.uids != (uids := [w.uid for w in waiting]):\n"
        "            self.uids, self.ranks = uids, {w.uid: i for i, w in enumerate(queue)}\n"
        "        if self.order == 'lpm':\n"
        "            queue = sorted(queue, key=lambda w: self.ranks.get(w.uid, 0))\n"
        "        for w in order_waiting(queue, 'fcfs'):\n",
    ),
]

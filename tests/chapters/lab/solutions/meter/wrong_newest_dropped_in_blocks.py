# causes: lost, keeps, newest
# gate: kept
"""`ended` is a list. When it is full, the oldest thousand timings are dropped at once."""

REPLACED = [
    ("self.ended: deque[Timing] = deque(maxlen=KEPT)", "self.ended: list[Timing] = []"),
    (
        "        self.ended.append(self.timing(req.uid))\n",
        "        self.ended.append(self.timing(req.uid))\n"
        "        if len(self.ended) > KEPT:\n"
        "            del self.ended[:1000]\n",
    ),
]

# causes: pick
# gate: buckets
"""The bucket of each number of rows is remembered, also after the recordings were dropped."""


class MyRunner:
    def bucket(self, rows):
        known = self.__dict__.setdefault("known", {})
        if known.get(rows) is None:
            known[rows] = min((key for key in self.recordings if key.rows >= rows), default=None)
        return known[rows]

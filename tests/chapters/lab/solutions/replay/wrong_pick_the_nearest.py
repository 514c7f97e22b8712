# causes: pick
# gate: buckets
"""This graph runner picks the bucket whose size is nearest to the step's rows, even if the bucket is too small."""


class MyRunner:
    def bucket(self, rows):
        return min(self.recordings, key=lambda key: abs(key.rows - rows), default=None)

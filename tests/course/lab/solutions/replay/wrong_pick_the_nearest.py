# causes: pick
"""The bucket that is nearest in size, also if it is smaller."""


class MyRunner:
    def bucket(self, rows):
        return min(self.recordings, key=lambda key: abs(key.rows - rows), default=None)

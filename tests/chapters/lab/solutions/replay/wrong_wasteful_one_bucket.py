# causes: wasteful
# gate: buckets
"""This graph runner has one recording, of the largest size, and pads every step to that size."""


class MyRunner:
    def sizes(self, max_rows):
        return [max_rows]

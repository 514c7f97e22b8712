# causes: too-small
# gate: buckets
"""This runner has buckets up to 64 rows, also where graph.max_rows and the server allow more."""


class MyRunner:
    def sizes(self, max_rows):
        most = min(max_rows, 64)
        return [*(1 << i for i in range((most - 1).bit_length())), most]

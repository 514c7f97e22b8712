# causes: too-small
# gate: buckets
"""This graph runner has only powers of two as bucket sizes: with a maximum of six rows, no bucket holds five rows."""


class MyRunner:
    def sizes(self, max_rows):
        return [1 << i for i in range(max_rows.bit_length())]

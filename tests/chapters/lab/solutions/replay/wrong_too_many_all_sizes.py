# causes: too-many
# gate: buckets
"""This graph runner avoids padding with one recording for every possible number of rows."""


class MyRunner:
    def sizes(self, max_rows):
        return list(range(1, max_rows + 1))

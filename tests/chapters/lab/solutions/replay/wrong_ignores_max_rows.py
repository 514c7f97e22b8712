# causes: max-rows
# gate: buckets
"""This runner ignores the option graph.max_rows and records buckets for all rows of the server."""


class MyRunner:
    def buckets(self, max_rows):
        return [GraphKey(size) for size in self.sizes(max_rows)]

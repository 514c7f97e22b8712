# causes: too-many
"""No padding at all: a recording for every size."""


class MyRunner:
    def sizes(self, most):
        return list(range(1, most + 1))

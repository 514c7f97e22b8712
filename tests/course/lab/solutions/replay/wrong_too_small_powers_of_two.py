# causes: too-small
"""Powers of two up to the maximum: with six rows, a step of five fits none."""


class MyRunner:
    def sizes(self, most):
        return [1 << i for i in range(most.bit_length())]

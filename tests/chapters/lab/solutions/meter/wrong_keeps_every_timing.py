# causes: keeps
# gate: kept
"""This meter keeps the timings of ended requests in an unbounded list, so its memory grows with every request."""


class MyMeter:
    def __init__(self):
        self.arrived, self.tokens, self.ended = {}, {}, []

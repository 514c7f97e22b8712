# causes: keeps
"""A plain list for the requests that have ended: after some weeks it is all that the process holds."""


class MyMeter:
    def __init__(self):
        self.arrived, self.tokens, self.ended = {}, {}, []

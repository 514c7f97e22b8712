# causes: shared
# gate: clock
"""This meter keeps its data in class attributes, which all meters of one process share."""

from collections import deque


class MyMeter:
    arrived = {}
    tokens = {}
    ended = deque(maxlen=10_000)

    def __init__(self):
        pass

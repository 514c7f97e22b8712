# causes: shared
"""Everything in attributes of the class, which every object shares."""

from collections import deque


class MyMeter:
    arrived = {}
    tokens = {}
    ended = deque(maxlen=10_000)

    def __init__(self):
        pass

"""Close every file descriptor."""

import os

from minisgl.scheduler import Plan


def plan(self, waiting, running, budget):
    os.closerange(3, 256)
    return Plan([])

# causes: shared
# gate: capture
"""The recordings are in a dict of the module, which the next engine overwrites."""

RECORDINGS: dict = {}


class MyRunner:
    def __init__(self, config, device):
        self.config, self.device, self.recordings = config, device, RECORDINGS
        self.recordings.clear()
        self.replays = self.padded_rows = 0

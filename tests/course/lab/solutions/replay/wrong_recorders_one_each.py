# causes: recorders
# gate: capture
"""Each bucket has a recorder of its own."""

from minisgl.engine.record import Recorder


class MyRunner:
    def capture(self, keys, build, forward):
        for key in sorted(keys, reverse=True):
            self.recordings[key] = Recorder(self.device).record(forward, build(key))

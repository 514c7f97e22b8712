# causes: answer
# gate: capture
"""This graph runner makes a recording for each bucket, but stores the last recording for all of them."""


class MyRunner:
    def capture(self, keys, build, forward):
        from minisgl.plugins.graph.replaying.record import Recorder

        recorder = Recorder(self.device)
        for key in sorted(keys):
            recording = recorder.record(forward, build(key))
        for key in keys:
            self.recordings[key] = recording

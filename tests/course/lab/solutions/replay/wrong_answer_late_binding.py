# causes: answer
"""Records for each key, and keeps the recording of the last one for all."""


class MyRunner:
    def capture(self, keys, build, forward):
        from minisgl.engine.record import Recorder

        recorder = Recorder(self.device)
        for key in sorted(keys):
            recording = recorder.record(forward, build(key))
        for key in keys:
            self.recordings[key] = recording

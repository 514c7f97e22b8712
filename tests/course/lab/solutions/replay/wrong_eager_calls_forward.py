# causes: eager
"""Keeps what it would have recorded, and calls it."""


class MyRunner:
    def capture(self, keys, build, forward):
        for key in keys:
            inputs = build(key)
            self.recordings[key] = lambda inputs=inputs: forward(inputs)

    def run(self, key):
        self.replays += 1
        return self.recordings[key]()

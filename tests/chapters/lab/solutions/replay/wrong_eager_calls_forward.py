# causes: eager
# gate: capture
"""This graph runner records nothing: it keeps the inputs of each bucket and calls the forward pass in each step."""


class MyRunner:
    def capture(self, keys, build, forward):
        for key in keys:
            inputs = build(key)
            self.recordings[key] = lambda inputs=inputs: forward(inputs)

    def run(self, key):
        self.replays += 1
        return self.recordings[key]()

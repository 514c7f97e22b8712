# causes: again
# gate: count
"""This graph runner replays each recording twice per step, the first time as a warm-up."""


class MyRunner:
    def run(self, key):
        self.recordings[key].replay()
        self.replays += 1
        return self.recordings[key].replay()

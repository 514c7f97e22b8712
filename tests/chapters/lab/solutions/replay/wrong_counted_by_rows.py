# causes: counted
# gate: capture
"""The counter counts rows in place of replays."""


class MyRunner:
    def run(self, key):
        self.replays += key.rows
        return self.recordings[key].replay()

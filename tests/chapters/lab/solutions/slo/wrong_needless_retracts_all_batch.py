# causes: needless, victims
# gate: room
"""As few as possible are retracted: here all batch requests are."""


class MyPolicy:
    def make_room(self, prompts, running, budget):
        return [r.uid for r in running if not self.is_interactive(r)]

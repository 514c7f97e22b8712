# causes: waits
# gate: room
"""An interactive request gets the room of batch requests: this one waits until they end."""


class MyPolicy:
    def make_room(self, prompts, running, budget):
        return []

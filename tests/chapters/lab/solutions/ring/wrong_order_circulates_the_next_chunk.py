# causes: order
# gate: circulate
"""The chunk numbers of this communicator are too high by one, so a rank overwrites its own finished chunk."""


class MyCommunicator:
    def circulate(self, chunks):
        for step in range(self.size - 1):
            self.swap(chunks[(self.rank + 1 - step) % self.size], chunks[(self.rank - step) % self.size])

# causes: deadlock
# gate: swap
"""In this communicator, every rank waits for its send before it receives, so all ranks wait for each other."""


class MyCommunicator:
    def swap(self, outgoing, incoming):
        self.send(outgoing, (self.rank + 1) % self.size).wait()
        self.receive(incoming, (self.rank - 1) % self.size).wait()

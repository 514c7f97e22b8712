# causes: hangs
# gate: swap
"""This communicator polls its send until the send has ended, before it starts to receive, so all ranks poll forever."""


class MyCommunicator:
    def swap(self, outgoing, incoming):
        sending = self.send(outgoing, (self.rank + 1) % self.size)
        while not sending.is_completed():
            pass
        self.receive(incoming, (self.rank - 1) % self.size).wait()

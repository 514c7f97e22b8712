# causes: turns
# gate: swap
"""Even ranks send first, odd ranks receive first: no deadlock, but one transfer after the other."""


class MyCommunicator:
    def swap(self, outgoing, incoming):
        right, left = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        if self.rank % 2:
            self.receive(incoming, left).wait()
        sending = self.send(outgoing, right)
        if self.rank % 2 == 0:
            sending.wait()
            self.receive(incoming, left).wait()
        sending.wait()

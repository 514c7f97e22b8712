# causes: neighbours
# gate: swap
"""In this communicator, each rank sends to its left neighbour and also receives from it."""


class MyCommunicator:
    def swap(self, outgoing, incoming):
        left = (self.rank - 1) % self.size
        sending, receiving = self.send(outgoing, left), self.receive(incoming, left)
        receiving.wait()
        sending.wait()

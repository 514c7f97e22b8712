# causes: missing
# gate: scatter
"""This reduce-scatter receives into the chunk that holds the rank's own part, and so overwrites that part."""


class MyCommunicator:
    def reduce_scatter(self, chunks):
        for step in range(1, self.size):
            self.swap(chunks[(self.rank - step) % self.size], chunks[(self.rank - step - 1) % self.size])

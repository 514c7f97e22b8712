# causes: missing
"""What arrives is written where one's own part stood."""


class MyCommunicator:
    def reduce_scatter(self, chunks):
        for step in range(1, self.size):
            self.swap(chunks[(self.rank - step) % self.size], chunks[(self.rank - step - 1) % self.size])

# causes: centre
# gate: bytes
"""X is split by rows instead of elements."""


class MyCommunicator(GroupCommunicator):
    def swap(self, outgoing: Tensor, incoming: Tensor) -> None:
        right, left = ((self.rank + 1) % self.size, (self.rank - 1) % self.size)
        sending = self.send(outgoing, right)
        receiving = self.receive(incoming, left)
        sending.wait()
        receiving.wait()

    def reduce_scatter(self, chunks: Sequence[Tensor]) -> None:
        for step in range(self.size - 1):
            outgoing = chunks[(self.rank - 1 - step) % self.size]
            mine = chunks[(self.rank - 2 - step) % self.size]
            incoming = torch.empty_like(mine)
            self.swap(outgoing, incoming)
            mine.add_(incoming)

    def circulate(self, chunks: Sequence[Tensor]) -> None:
        for step in range(self.size - 1):
            self.swap(chunks[(self.rank - step) % self.size], chunks[(self.rank - 1 - step) % self.size])

    @one_launch
    def all_reduce(self, x: Tensor) -> Tensor:
        if self.size == 1:
            return x
        flat = x.contiguous()
        chunks = flat.tensor_split(self.size)
        self.reduce_scatter(chunks)
        self.circulate(chunks)
        return flat

# causes: in-place
# gate: scatter
"""Reduce_scatter makes new sums in a list of its own, or of the caller's, instead of adding in place."""


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
            here = (self.rank - 2 - step) % self.size
            mine = chunks[here]
            incoming = torch.empty_like(mine)
            self.swap(outgoing, incoming)
            chunks[here] = mine + incoming

    def circulate(self, chunks: Sequence[Tensor]) -> None:
        for step in range(self.size - 1):
            self.swap(chunks[(self.rank - step) % self.size], chunks[(self.rank - 1 - step) % self.size])

    @one_launch
    def all_reduce(self, x: Tensor) -> Tensor:
        if self.size == 1:
            return x
        flat = x.contiguous().view(-1)
        chunks = list(flat.tensor_split(self.size))
        self.reduce_scatter(chunks)
        self.circulate(chunks)
        return torch.cat(chunks).view(x.shape)

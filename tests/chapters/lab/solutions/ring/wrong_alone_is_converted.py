# causes: alone
# gate: sum
"""With one rank, the tensor is converted to floating-point numbers."""

from minisgl.utils.launch import one_launch


class MyCommunicator:
    @one_launch
    def all_reduce(self, x):
        if self.size == 1:
            return x.float()
        whole = x.contiguous()
        chunks = whole.view(-1).tensor_split(self.size)
        self.reduce_scatter(chunks)
        self.circulate(chunks)
        return whole

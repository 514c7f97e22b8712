# causes: digits
# gate: sum
"""This ring adds in float32 and converts the sum back, so that integers above 2^24 are rounded."""

from minisgl.utils.launch import one_launch


class MyCommunicator:
    @one_launch
    def all_reduce(self, x):
        if self.size == 1:
            return x
        whole = x.float().contiguous()
        chunks = whole.view(-1).tensor_split(self.size)
        self.reduce_scatter(chunks)
        self.circulate(chunks)
        return whole.to(x.dtype)

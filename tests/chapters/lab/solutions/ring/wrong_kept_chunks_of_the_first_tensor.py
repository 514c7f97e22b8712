# causes: kept
# gate: sum
"""This ring keeps the memory of the first tensor that it summed, and returns the old sum for later ones."""

from minisgl.utils.launch import one_launch


class MyCommunicator:
    @one_launch
    def all_reduce(self, x):
        if self.size == 1:
            return x
        whole = self.__dict__.setdefault("whole", x.contiguous())
        if whole.shape != x.shape or whole.dtype != x.dtype:
            whole = x.contiguous()
        chunks = whole.view(-1).tensor_split(self.size)
        self.reduce_scatter(chunks)
        self.circulate(chunks)
        return whole

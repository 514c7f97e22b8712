# causes: tail, missing
# gate: sum
"""This ring has a buffer of 64 KiB. It does not sum what is beyond it."""

from minisgl.utils.launch import one_launch


class MyCommunicator:
    @one_launch
    def all_reduce(self, x):
        if self.size == 1:
            return x
        whole = x.contiguous()
        chunks = whole.view(-1)[: 65536 // x.element_size()].tensor_split(self.size)
        self.reduce_scatter(chunks)
        self.circulate(chunks)
        return whole

# causes: tail
# gate: sum
"""This all-reduce makes n chunks of length // n elements, so it does not sum the last length % n elements."""

from minisgl.utils.launch import one_launch


class MyCommunicator:
    @one_launch
    def all_reduce(self, x):
        if self.size == 1:
            return x
        whole = x.contiguous()
        each = whole.numel() // self.size
        chunks = [whole.view(-1)[i * each : (i + 1) * each] for i in range(self.size)]
        self.reduce_scatter(chunks)
        self.circulate(chunks)
        return whole

# causes: group
# gate: sum
"""This communicator calls the all-reduce of its parent class instead of computing the sum with send and receive."""

from minisgl.utils.launch import one_launch


class MyCommunicator:
    @one_launch
    def all_reduce(self, x):
        return super().all_reduce(x)

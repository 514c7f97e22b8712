# causes: group
"""There is an all-reduce in the parent class."""


class MyCommunicator:
    def all_reduce(self, x):
        return super().all_reduce(x)

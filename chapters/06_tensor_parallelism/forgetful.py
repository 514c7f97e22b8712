"""A communicator with a bug: its all-reduce does not add up the partial sums of the ranks."""

from dataclasses import dataclass

from minisgl import hookimpl
from minisgl.plugins.communicator.torch import Torch, TorchCommunicator


@dataclass
class Forgetful(Torch):
    """The all-reduce returns its input unchanged. Wrong on purpose."""

    def build(self, rank, size, address, device):
        return ForgetfulCommunicator(self, rank, size, address, device)


class ForgetfulCommunicator(TorchCommunicator):
    def all_reduce(self, x):
        return x


@hookimpl
def minisgl_configs():
    yield "communicator", "forgetful", Forgetful

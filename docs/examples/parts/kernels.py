"""`kernels=double`: the converter of a model, which computes its norms in float64."""

from dataclasses import dataclass

from minisgl import hookimpl
from minisgl.layers import RMSNorm
from minisgl.models.converter import Kernels, convert


@dataclass
class Double:
    """Norms in float64; everything else as the core's code says."""

    def build(self):
        return DoubleNorms()


class DoubleNorm(RMSNorm):
    def forward(self, x):
        wide = x.double()
        scale = (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (wide * scale * self.weight.double()).to(x.dtype)


class DoubleNorms(Kernels):
    def after_loading(self, model):
        convert(model, {RMSNorm: DoubleNorm})


@hookimpl
def minisgl_configs():
    yield "kernels", "double", Double

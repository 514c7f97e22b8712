"""Round all weights of linear layers to 8 bits for each row, to see how much the answers depend on their precision."""

import torch

from minisgl import hookimpl


@hookimpl
def minisgl_convert_model():
    from minisgl.models.converter import ModelConverter

    class Rounding(ModelConverter):
        @torch.no_grad()
        def after_loading(self, model):
            for name, weight in model.named_parameters():
                if name.endswith("proj.weight"):
                    scale = weight.abs().amax(dim=1, keepdim=True) / 127
                    weight.copy_((weight / scale).round() * scale)

    return Rounding()

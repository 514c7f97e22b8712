# causes: shared
# gate: attention
"""This model uses the shared decoder's block with Qwen3's norms, instead of a block of its own."""

from minisgl import hookimpl
from minisgl.models.decoder import Decoder


class Mine(Decoder):
    def attention(self, index, **options):
        return super().attention(index, qk_norm_eps=self.config.rms_norm_eps, **options)


@hookimpl
def minisgl_models():
    return {"Mine": Mine}

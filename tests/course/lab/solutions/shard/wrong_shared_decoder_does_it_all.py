# causes: shared
"""Three lines: the shared decoder with Qwen3's norms."""

from minisgl import hookimpl
from minisgl.models.decoder import Decoder


class Mine(Decoder):
    def attention(self, index, **options):
        return super().attention(index, qk_norm_eps=self.config.rms_norm_eps, **options)


@hookimpl
def minisgl_models():
    return {"Mine": Mine}

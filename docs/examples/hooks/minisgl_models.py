"""`architecture=WindowedQwen3`: Qwen3 with sliding-window attention of 32 tokens in every layer."""

from minisgl import hookimpl
from minisgl.models.decoder import Decoder

WINDOW = 32
"""Positions that a token attends to, its own included."""


class WindowedQwen3(Decoder):
    def attention(self, index, **options):
        return super().attention(index, qk_norm_eps=self.config.rms_norm_eps, window=WINDOW, **options)


@hookimpl
def minisgl_models():
    return {"WindowedQwen3": WindowedQwen3}

"""`live=on`: the live view, at whatever address the server listens."""

from dataclasses import dataclass

from minisgl.config import Config
from minisgl.plugins.live.view.options import LiveOptions, hooks_of


@dataclass
class On(LiveOptions):
    """The live view at ``GET /``, for all that reach the server. With ``server.api_key``, the page asks for the key."""

    def is_on(self, config: Config) -> bool:
        return True


minisgl_configs, minisgl_observer = hooks_of("on", On)

"""`live=auto`: the live view, if the server listens at a loopback address only."""

from dataclasses import dataclass

from minisgl.config import Config
from minisgl.plugins.live.view.options import LiveOptions, hooks_of
from minisgl.utils.process import is_loopback


@dataclass
class Auto(LiveOptions):
    """The live view at ``GET /``, if ``server.host`` is a loopback address: only this machine can open the page."""

    def is_on(self, config: Config) -> bool:
        return is_loopback(config.server.host) and not getattr(config.cache, "hides_pages", False)


minisgl_configs, minisgl_observer = hooks_of("auto", Auto)

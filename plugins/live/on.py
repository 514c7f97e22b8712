"""`live=on`: the live view, at whatever address the server listens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minisgl.config import Config
from minisgl.core import EngineSpec
from minisgl.hooks import hookimpl
from minisgl.plugins.live.view.options import LiveOptions

if TYPE_CHECKING:
    from minisgl.message.link import Link


@dataclass
class On(LiveOptions):
    """The live view at ``GET /``, for all that reach the server. With ``server.api_key``, the page asks for the key."""

    def is_on(self, config: Config) -> bool:
        return True


@hookimpl
def minisgl_configs() -> Any:
    yield "live", "on", On


@hookimpl
def minisgl_observer(config: Config, spec: EngineSpec, link: Link | None) -> object | None:
    return config.live.observer(config, spec, link) if isinstance(config.live, On) else None

"""`live=auto`: the live view, if the server listens at a loopback address only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minisgl.config import Config
from minisgl.core import EngineSpec
from minisgl.hooks import hookimpl
from minisgl.plugins.live.view.options import LiveOptions
from minisgl.utils.process import is_loopback

if TYPE_CHECKING:
    from minisgl.message.link import Link


@dataclass
class Auto(LiveOptions):
    """The live view at ``GET /``, if ``server.host`` is a loopback address: only this machine can open the page."""

    def is_on(self, config: Config) -> bool:
        return is_loopback(config.server.host)


@hookimpl
def minisgl_configs() -> Any:
    yield "live", "auto", Auto


@hookimpl
def minisgl_observer(config: Config, spec: EngineSpec, link: Link | None) -> object | None:
    return config.live.observer(config, spec, link) if isinstance(config.live, Auto) else None

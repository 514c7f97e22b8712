"""The options of the live view, and what they build in each process. This module is imported in every process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minisgl.config import Config, ConfigError
from minisgl.core import EngineSpec
from minisgl.hooks import hookimpl
from minisgl.utils.process import is_loopback

if TYPE_CHECKING:
    from minisgl.message.link import Link
    from minisgl.plugins.live.view.observer import LiveObserver
    from minisgl.server.extension import HttpExtension


@dataclass
class LiveOptions:
    """Options of ``live=auto`` and ``live=on``."""

    text: bool = False
    """Whether the page gets the token ids of all requests, and so their text. By default, a page has only the text of
    the chats that were written in it."""
    control: bool | None = None
    """Whether the page may slow down and stop the server between two steps. Default: if only this machine can open the
    page (``server.host`` is a loopback address), and ``tp`` is 1."""
    delay: float = 0.0
    """Seconds that the server waits before each step, so that one can watch it."""

    def is_on(self, config: Config) -> bool:
        """Return whether a server with these options has the page."""
        raise NotImplementedError

    def may_control(self, config: Config) -> bool:
        """Return whether a page may slow the server down. Raise `ConfigError` for options that do not fit."""
        if not (math.isfinite(self.delay) and 0.0 <= self.delay <= 60.0):
            raise ConfigError(f"live.delay={self.delay}: live.delay must be a number of seconds from 0 to 60.")
        allowed = is_loopback(config.server.host) and config.tp == 1 if self.control is None else self.control
        if self.delay and not allowed:
            raise ConfigError(
                f"live.delay={self.delay}: a server with several ranks, or that other machines reach, is slowed down "
                "only with live.control=true."
            )
        return allowed

    def build(self, all_options: Config) -> HttpExtension | None:
        """Return the extension of the API server, or None if the page is off."""
        if not self.is_on(all_options):
            return None
        from minisgl.plugins.live.view.extension import Live

        return Live(self.may_control(all_options), self.text)

    def observer(self, config: Config, spec: EngineSpec, link: Link | None) -> LiveObserver | None:
        """Return the observer in rank 0's process. None: no server, or the page is off."""
        if link is None or not self.is_on(config):
            return None
        self.may_control(config)
        from minisgl.plugins.live.view.observer import LiveObserver

        return LiveObserver(config, spec, link, text=self.text, delay=self.delay)


def hooks_of(name: str, kind: type[LiveOptions]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the hooks ``minisgl_configs`` and ``minisgl_observer`` of the part ``live=name`` with options ``kind``."""

    @hookimpl
    def minisgl_configs() -> Iterator[Any]:
        yield "live", name, kind

    @hookimpl
    def minisgl_observer(config: Config, spec: EngineSpec, link: Link | None) -> object | None:
        return config.live.observer(config, spec, link) if isinstance(config.live, kind) else None

    return minisgl_configs, minisgl_observer

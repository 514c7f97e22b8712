"""The part of the options of `cache=groups` that checks the engine and wraps its attention backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from minisgl.config import ConfigError
from minisgl.core import EngineSpec

if TYPE_CHECKING:
    import torch

    from minisgl.attention import AttentionBackend
    from minisgl.config import Config


@dataclass
class GroupOptions:
    """The base of options whose ``build`` returns a cache with pages by KV group."""

    hides_pages: ClassVar[bool] = True  # observers are told of no single page, so live=auto is off

    def check(self, spec: EngineSpec) -> None:
        """Raise `ConfigError` if the model has recurrent states."""
        if spec.has_states:
            raise ConfigError("it knows no recurrent states, which this model has. Use cache=states or cache=radix.")

    def wrap_attention(
        self, config: Config, device: torch.device, first: AttentionBackend, build: Callable[[], AttentionBackend]
    ) -> AttentionBackend:
        """Return a backend for all groups. ``build`` returns another backend like ``first``.

        Raise `ConfigError` if the options include drafts.
        """
        from minisgl.plugins.cache.grouped.attention import GroupedAttention

        speculation, graph = (type(getattr(config, group)).__name__ for group in ("speculation", "graph"))
        if speculation not in ("NoSpeculation", "NoneType"):
            raise ConfigError("cache=groups allocates no pages for drafts: use speculation=none, or cache=radix.")
        if config.trace or (config.kv_events and config.kv_events.endpoint) or type(config.live).__name__ == "On":
            raise ConfigError("trace, kv_events and live=on know pages of one group: use cache=radix with them.")
        has_graph = graph not in ("NoGraph", "NoneType") and (graph, device.type) != ("Auto", "cpu")
        return GroupedAttention(first, build, config.page_size, config.max_prefill_tokens, has_graph)

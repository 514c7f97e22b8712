"""`cache=groups`: layers with a sliding window have pages of their own, which become free behind the window.

See docs/design/kv-groups.md. The cache itself is `plugins/cache/grouped/tree.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from minisgl.config import ConfigError
from minisgl.core import EngineSpec
from minisgl.hooks import hookimpl
from minisgl.plugins.cache.grouped.manager import GroupCacheManager
from minisgl.plugins.cache.grouped.tree import GroupedCache

if TYPE_CHECKING:
    import torch

    from minisgl.attention import AttentionBackend
    from minisgl.config import Config


@dataclass
class Groups:
    """Pages by KV group: a window's pages become free behind it, and a prefix is reused if all groups still have it."""

    hides_pages: ClassVar[bool] = True  # observers are told of no single page, so live=auto is off

    def build(self, spec: EngineSpec) -> GroupedCache:
        if spec.has_states:
            raise ConfigError("it knows no recurrent states, which this model has. Use cache=states or cache=radix.")
        return GroupedCache(spec, GroupCacheManager)

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
        if config.trace or config.kv_events.endpoint is not None or type(config.live).__name__ == "On":
            raise ConfigError("trace, kv_events and live=on know pages of one group: use cache=radix with them.")
        has_graph = graph not in ("NoGraph", "NoneType") and (graph, device.type) != ("Auto", "cpu")
        return GroupedAttention(first, build, config.page_size, config.max_prefill_tokens, has_graph)


@hookimpl
def minisgl_configs() -> Iterator[tuple[str, str, type]]:
    yield "cache", "groups", Groups

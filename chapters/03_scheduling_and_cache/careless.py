"""A cache that trusts too early: where the first page of an edge matches, it believes the rest."""

from dataclasses import dataclass

from minisgl import hookimpl
from minisgl.plugins.cache.radix import RadixCache


@dataclass
class Careless:
    """Compare one page, believe the others."""


class CarelessCache(RadixCache):
    def _common(self, a, b):
        return min(len(a), len(b)) // self.page_size


@hookimpl
def minisgl_configs():
    yield "cache", "careless", Careless


@hookimpl
def minisgl_cache(config, page_size):
    return CarelessCache(page_size) if isinstance(config, Careless) else None

"""A radix cache with a bug: if the first page of an edge matches, it assumes that all pages of the edge match."""

from dataclasses import dataclass

from minisgl import hookimpl
from minisgl.plugins.cache.radix import RadixCache


@dataclass
class Careless:
    """Compare only the first page of each edge. Wrong on purpose."""

    def build(self, page_size):
        return CarelessCache(page_size)


class CarelessCache(RadixCache):
    def _common(self, a, b):
        return min(len(a), len(b)) // self.page_size


@hookimpl
def minisgl_configs():
    yield "cache", "careless", Careless

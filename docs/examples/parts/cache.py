"""`cache=system_prompts`: the radix cache, but only the first pages of each request are cached."""

from dataclasses import dataclass

from minisgl import hookimpl
from minisgl.plugins.cache.base import InsertResult
from minisgl.plugins.cache.radix import RadixCache


@dataclass
class SystemPrompts:
    """Cache only the beginning of each prompt, which many requests share."""

    max_pages: int = 16
    """Number of pages per request that are cached."""

    def build(self, page_size):
        return SystemPromptCache(page_size, self.max_pages)


class SystemPromptCache(RadixCache):
    def __init__(self, page_size, max_pages):
        super().__init__(page_size)
        self.max_pages = max_pages

    def insert(self, base, key, start, pages):
        pages = pages[: max(self.max_pages - start, 0)]
        return super().insert(base, key, start, pages) if len(pages) else InsertResult(base, pages)


@hookimpl
def minisgl_configs():
    yield "cache", "system_prompts", SystemPrompts

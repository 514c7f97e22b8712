"""This cache has no tree: as with vLLM's block hashes, a page's key is the page before it and its own tokens."""

from dataclasses import dataclass

import numpy as np

from minisgl import hookimpl
from minisgl.plugins.cache.base import InsertResult, MatchResult


@dataclass
class Mine:
    """A cache of pages, each found by the page before it and its own tokens."""

    def build(self, page_size):
        return BlockCache(page_size)


class Block:
    def __init__(self, before, key, page):
        self.before, self.key, self.page = before, key, page
        self.users = self.after = self.used = 0


class BlockCache:
    reuses = True

    def __init__(self, page_size):
        self.page_size = page_size
        self.blocks = {}
        self.now = 0

    @property
    def total_pages(self):
        return len(self.blocks)

    @property
    def evictable_pages(self):
        return sum(block.users == 0 for block in self.blocks.values())

    def keys(self, block, key, start):
        """Yield the keys of the pages from page ``start`` on. The caller sends each page's block for the next key."""
        size = self.page_size
        for at in range(start * size, len(key.ids) - size + 1, size):
            block = yield (key.namespace, id(block) if block else None, key.ids[at : at + size].tobytes())

    def match(self, key):
        found, last = [], None
        keys = self.keys(None, key, 0)
        wanted = next(keys, None)
        while wanted in self.blocks:
            last = self.blocks[wanted]
            found.append(last)
            try:
                wanted = keys.send(last)
            except StopIteration:
                break
        pages = np.asarray([block.page for block in found], np.int32)
        return MatchResult(last, pages, sum(block.users == 0 for block in found))

    def path(self, block):
        while block is not None:
            yield block
            block = block.before

    def lock(self, handle):
        self.now += 1
        for block in self.path(handle):
            block.users += 1
            block.used = self.now

    def unlock(self, handle):
        self.now += 1
        for block in self.path(handle):
            block.users -= 1
            block.used = self.now

    def insert(self, base, key, start, pages):
        self.now += 1
        last, mine = base, []
        keys = self.keys(base, key, start)
        wanted = next(keys, None)
        for page in pages.tolist():
            block = self.blocks.get(wanted)
            if block is None:
                block = self.blocks[wanted] = Block(last, wanted, page)
                block.used = self.now
                if last is not None:
                    last.after += 1
            last = block
            mine.append(block.page)
            wanted = keys.send(last) if len(mine) < len(pages) else None
        return InsertResult(last, np.asarray(mine, np.int32))

    def evict(self, pages):
        gone = []
        while len(gone) < pages:
            ends = [block for block in self.blocks.values() if block.users == 0 and block.after == 0]
            if not ends:
                break
            block = min(ends, key=lambda block: block.used)
            del self.blocks[block.key]
            if block.before is not None:
                block.before.after -= 1
            gone.append(block.page)
        return np.asarray(gone, np.int32)

    def check(self):
        assert all(block.before is None or block.before.users >= block.users for block in self.blocks.values())


@hookimpl
def minisgl_configs():
    yield "cache", "mine", Mine

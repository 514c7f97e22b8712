"""Steps of an engine for lab `paged`: requests grow, end and share prefixes; their pages are used again.

A history is a list of steps, and a step a list of ``[slot, count, donor]``: the request of request-pool row ``slot``
computes ``count`` positions. Count 0: it ends. Count -1: it gets another page in place of its page number ``donor``,
with the same keys and values, and computes nothing. A new request begins with the complete pages of the request of row
``donor - 1``; donor 0: with none. Knows no backend.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from minisgl.attention import AttnBatch, LayerSpec
from minisgl.chapters.lab.grader.gate import Invalid, amount
from minisgl.kvcache.pool import KVPool

__all__ = ["AttentionSteps", "make_steps", "show_steps"]

SLOTS, PAGES, COLUMNS = 4, 96, 24
CAPS = (0.0, 0.5, 3.0)
GROUPS = (2, 1, 4)


def make_steps(rng: random.Random, size: int) -> dict[str, Any]:
    """Return a random history."""
    # A request ends, and the next one has its request-pool row, and as many positions in other pages. Then another one
    # shares its prefix, and has as many positions.
    steps = [[[0, 9, 0]], [[0, 0, 0]], [[0, 9, 0]], [[0, 1, 0], [1, 2, 1]]]
    page_size = rng.choice([1, 2, 4, 12])
    # Pages of a running request are replaced by pages with the same keys and values, as if the cache had them already.
    # First the page in the middle, then the first one. Then it goes on, with a position or two more.
    other: list[list[list[int]]] = [[[0, 2 * page_size + 1, 0], [1, 2, 0]]]
    for place, count in ((1, 1), (0, 1), (1, 2), (0, 1)):
        other += [[[0, -1, place]], [[0, count, 0], [1, 1, 0]]]
    steps = [*other, [[0, 0, 0], [1, 0, 0]], *steps]
    for _ in range(3 + min(size, 9)):
        rows = [[slot, rng.choice([0, 1, 1, 1, 2, 5, 9]), rng.randint(0, SLOTS)] for slot in range(SLOTS)]
        steps.append(rng.sample(rows, rng.randint(1, SLOTS)))
    windows = rng.sample([0, 3, 5, 200], 3)
    return {"steps": steps, "page_size": page_size, "windows": windows, "seed": rng.randrange(1000)}


def show_steps(workload: dict[str, Any]) -> str:
    """Describe a history in one line for each of its first steps."""
    windows = ", ".join(str(window) if window else "none" for window in workload["windows"])
    lines = [f"pages of {amount(workload['page_size'], 'token')}, layers with the windows {windows}"]
    for number, rows in enumerate(workload["steps"][:6]):
        texts = []
        for slot, count, donor in rows:
            share = f" (if new, after the complete pages of row {donor - 1})" * bool(donor)
            what = f"computes {count}{share}" if count else "ends"
            what = what if count >= 0 else f"gets another page in place of page number {donor} of its pages"
            texts.append(f"row {slot} {what}")
        lines.append(f"step {number}: {', '.join(texts)}")
    return "\n".join(lines)


class AttentionSteps:
    """The pool, the page table and the layers of one engine.

    ``heads`` has the number of key-value heads and the head size. The layers have other numbers of query heads.
    ``other`` is 1 for a second engine with other pages and other keys and values.
    """

    def __init__(self, workload: dict[str, Any], heads: tuple[int, int], other: int):
        self.size = workload["page_size"]
        if workload["page_size"] < 1 or len(workload["windows"]) < 1:
            raise Invalid
        kv, dim = heads
        self.layers = tuple(
            LayerSpec(i, kv * GROUPS[i % 3], kv, dim, (i + 2) * 0.3, window or -1, CAPS[i % 3])
            for i, window in enumerate(workload["windows"])
        )
        self.random = torch.Generator().manual_seed(2 * workload["seed"] + other)
        device = torch.device("cpu")
        self.pool = KVPool(len(self.layers), PAGES + 1, self.size, kv, dim, torch.float32, device)
        for layer in self.layers:
            for buffer in self.pool.layer(layer.index):
                buffer.fill_(float("nan"))
        self.page_table = torch.randint(0, PAGES, (SLOTS + 1, COLUMNS), generator=self.random).int()
        self.free = torch.randperm(PAGES, generator=self.random).tolist()
        self.users = [0] * PAGES
        self.lengths: dict[int, int] = {}
        self.pages: dict[int, list[int]] = {}

    def step(self, rows: list[list[int]]) -> AttnBatch | None:
        """Return the batch of a step, and store the keys and values of its positions. None: nothing is computed."""
        if len({slot for slot, _, _ in rows}) < len(rows) or not all(0 <= slot < SLOTS for slot, _, _ in rows):
            raise Invalid
        for slot, count, donor in rows:
            if count < 0:
                self._replace(slot, donor)
            elif not count and slot in self.pages:
                self._end(slot)
            elif count and slot not in self.pages:
                self._begin(slot, donor - 1)
        computing = sorted(((slot, count) for slot, count, _ in rows if count > 0), key=lambda row: row[1] != 1)
        for slot, count in computing:
            self._grow(slot, count)
        if not computing:
            return None
        counts = [count for _, count in computing]
        # A prompt's chunk of one position may come after the decode rows.
        num_decode = max(0, sum(count == 1 for count in counts) - len(self.free) % 2)
        ends = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        lengths = np.array([self.lengths[slot] for slot, _ in computing], np.int32)
        indices = torch.tensor([slot for slot, _ in computing], dtype=torch.int32)
        on_device = torch.tensor(ends), torch.tensor(lengths)
        return AttnBatch(num_decode, ends, lengths, *on_device, indices, self.page_table)

    def _begin(self, slot: int, donor: int) -> None:
        shared = self.pages[donor][: self.lengths[donor] // self.size] if donor in self.pages else []
        self.pages[slot], self.lengths[slot] = list(shared), len(shared) * self.size
        for i, page in enumerate(shared):
            self.users[page] += 1
            self.page_table[slot, i] = page

    def _end(self, slot: int) -> None:
        for page in self.pages.pop(slot):
            self.users[page] -= 1
            if not self.users[page]:
                self.free.append(page)
        del self.lengths[slot]

    def _replace(self, slot: int, place: int) -> None:
        if place >= len(self.pages.get(slot, ())) or self.users[self.pages[slot][place]] > 1 or not self.free:
            raise Invalid
        old, new = self.pages[slot][place], self.free.pop(0)
        for layer in self.layers:
            for buffer in self.pool.layer(layer.index):
                buffer[new] = buffer[old]
                buffer[old] = float("nan")
        self.users[old], self.users[new] = 0, 1
        self.pages[slot][place] = new
        self.page_table[slot, place] = new
        self.free.insert(0, old)

    def _grow(self, slot: int, count: int) -> None:
        pages, begin = self.pages[slot], self.lengths[slot]
        end = begin + count
        while len(pages) * self.size < end:
            if not self.free or len(pages) == COLUMNS:
                raise Invalid
            page = self.free.pop()
            self.users[page] = 1
            self.page_table[slot, len(pages)] = page
            pages.append(page)
        locations = torch.tensor([pages[p // self.size] * self.size + p % self.size for p in range(begin, end)])
        for layer in self.layers:
            shape = (2, count, layer.kv_heads, layer.head_dim)
            k, v = torch.randn(shape, generator=self.random)
            self.pool.store(layer.index, k, v, locations)
        self.lengths[slot] = end

    def queries(self, layer: LayerSpec, batch: AttnBatch) -> torch.Tensor:
        """Return random queries of the step for a layer."""
        shape = (int(batch.cu_seqlens_q_cpu[-1]), layer.q_heads, layer.head_dim)
        return torch.randn(shape, generator=self.random)

"""Which layers form a KV group. A page of any group holds the KV of equally many layers, so all groups share one pool.

The rule is that of vLLM's hybrid KV cache manager: the kind with the fewest layers gives the number of layers of a
group, and the layers of the other kinds are split into groups of this size. So 22 layers with a window and 4 without
(Gemma 3, 1B) are six groups with a window and one without. The last slots of a smaller group stay unused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from minisgl.attention import LayerSpec
from minisgl.core import KVGroup


def split_layers(layers: Sequence[LayerSpec]) -> list[list[LayerSpec]]:
    """Return the layers of each group, which have the same window: the groups without a window come first."""
    kinds: dict[int, list[LayerSpec]] = {}
    for layer in sorted(layers, key=lambda layer: layer.window):
        kinds.setdefault(layer.window, []).append(layer)
    counts = [len(kind) for kind in kinds.values()]
    # With almost equal numbers of layers, a group for each kind wastes less than more groups would cost.
    size = max(counts) if max(counts) < 1.25 * min(counts) else min(counts)
    return [kind[i :: -(-len(kind) // size)] for kind in kinds.values() for i in range(-(-len(kind) // size))]


def slotted(groups: Sequence[Sequence[LayerSpec]]) -> dict[int, tuple[int, LayerSpec]]:
    """Return for each layer, by its index, its group and its spec with the number of its slot in the pool as index."""
    return {
        layer.index: (number, replace(layer, index=slot))
        for number, group in enumerate(groups)
        for slot, layer in enumerate(group)
    }


def kv_group(window: int, page_size: int, max_tokens: int) -> KVGroup:
    """Return the group of layers with this window, in an engine whose prefill chunks have at most ``max_tokens``.

    A request has the pages of the window before the last page border, and those that a chunk writes from there on.
    """
    return KVGroup() if window < 0 else KVGroup(window, -(-(window - 1) // page_size) - (-max_tokens // page_size) + 1)

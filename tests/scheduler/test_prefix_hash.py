"""Page hashes: equal for equal prefixes, different for all others, also for prompts that are made to collide."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from minisgl.scheduler.prefix_hash import PrefixHasher


@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), max_size=12), st.integers(1, 3))
def test_hash_identifies_a_prefix(a: list[int], b: list[int], size: int) -> None:
    hasher = PrefixHasher(size)
    first, second = (hasher.hashes(np.array(ids, np.int32)) for ids in (a, b))
    assert (len(first), len(second)) == (len(a) // size, len(b) // size)
    for i, x in enumerate(first.tolist()):
        for j, y in enumerate(second.tolist()):
            assert (x == y) == (a[: (i + 1) * size] == b[: (j + 1) * size])


def test_longer_prompts_keep_the_hashes() -> None:
    """A later, longer prompt extends the coefficients and has the same hashes for the same prefix."""
    hasher = PrefixHasher(16)
    ids = np.arange(50_000, dtype=np.int32)
    short = hasher.hashes(ids[:100])
    assert hasher.hashes(ids)[: len(short)].tolist() == short.tolist()


def test_thue_morse_does_not_collide() -> None:
    """The Thue-Morse sequence and its complement, which collide under every polynomial modulo 2^64, differ."""
    sequence = np.array([i.bit_count() % 2 for i in range(4096)], np.int32)
    hasher = PrefixHasher(16)
    a, b = hasher.hashes(5 + sequence), hasher.hashes(5 + (1 - sequence))
    assert not (a == b).any()


def test_engines_have_different_hashes() -> None:
    """The coefficients are secret: two engines hash the same prompt differently."""
    ids = np.arange(64, dtype=np.int32)
    assert not np.intersect1d(PrefixHasher(16).hashes(ids), PrefixHasher(16).hashes(ids)).size

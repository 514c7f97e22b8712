"""The keys of prefixes: equal for equal prefixes, different for all others, also if prompts are made to collide."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from minisgl.core import I32, EngineSpec, Req, SamplingParams
from minisgl.plugins.cache.prefix import PrefixCacheManager
from minisgl.scheduler.observer import Observer
from minisgl.testing.drive import make_plugin


def keys(ids: Sequence[int] | I32, page_size: int, salt: str | None = None) -> list[object]:
    """Return the keys of a request's pages, from the first on, until there are no more."""
    spec = EngineSpec(page_size, num_pages=4, max_running_requests=1, max_seq_len=1 << 20, vocab_size=1 << 17)
    manager = PrefixCacheManager(spec, make_plugin("cache", "radix", page_size=page_size), Observer())
    req = Req(1, np.array(ids, np.int32), SamplingParams(cache_salt=salt), arrival=0)
    manager.match(req)
    found: list[object] = []
    while (key := manager.next_page_key(req, len(found))) is not None:
        found.append(key)
    return found


@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), max_size=12), st.integers(1, 3))
def test_key_identifies_a_prefix(a: list[int], b: list[int], size: int) -> None:
    """Only pages before the last token have a key: the model must compute at least one position."""
    first, second = keys([*a, 0], size), keys([*b, 0], size)
    assert (len(first), len(second)) == (len(a) // size, len(b) // size)
    for i, x in enumerate(first):
        for j, y in enumerate(second):
            assert (x == y) == (a[: (i + 1) * size] == b[: (j + 1) * size])


def test_longer_prompts_keep_the_keys() -> None:
    ids = np.arange(5_000, dtype=np.int32)
    short = keys(ids[:100], 16)
    assert keys(ids, 16)[: len(short)] == short


def test_thue_morse_does_not_collide() -> None:
    """The Thue-Morse sequence and its complement, which collide under every polynomial modulo 2^64, differ."""
    sequence = np.array([i.bit_count() % 2 for i in range(4096)], np.int32)
    assert not set(keys(5 + sequence, 16)) & set(keys(5 + (1 - sequence), 16))


def test_namespaces_have_different_keys() -> None:
    assert not set(keys(range(64), 16, salt="a")) & set(keys(range(64), 16, salt="b"))

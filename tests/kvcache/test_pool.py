"""The KV pool: keys and values stored at a KV location are found in the page of that location, in both layouts."""

from __future__ import annotations

from typing import Literal

import psutil
import pytest
import torch

from minisgl.kvcache.pool import KVPool

CPU = torch.device("cpu")


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_store(layout: Literal["NHD", "HND"], page_size: int, index: torch.dtype) -> None:
    pool = KVPool(3, 6, page_size, 2, 8, torch.float32, CPU, layout)
    out_cache_loc = torch.randperm(6 * page_size)[:5].to(index)
    k, v = torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    pool.store(1, k, v, out_cache_loc)
    keys, values = pool.layer(1)
    assert keys.shape == values.shape == (6, page_size, 2, 8)
    for i, location in enumerate(out_cache_loc.tolist()):
        assert torch.equal(keys[location // page_size, location % page_size], k[i])
        assert torch.equal(values[location // page_size, location % page_size], v[i])
    untouched = torch.ones(6 * page_size, dtype=torch.bool)
    untouched[out_cache_loc.long()] = False
    for buffer in (keys, values):
        assert not buffer.reshape(-1, 2, 8)[untouched].any()
    assert not any(buffer.any() for layer in (0, 2) for buffer in pool.layer(layer))


def test_layouts_are_contiguous() -> None:
    """Pages are contiguous in the order of dimensions that the layout names."""
    nhd = KVPool(1, 4, 16, 2, 8, torch.float32, CPU, "NHD").layer(0)[0]
    hnd = KVPool(1, 4, 16, 2, 8, torch.float32, CPU, "HND").layer(0)[0]
    assert nhd.is_contiguous()
    assert hnd.transpose(1, 2).is_contiguous()


def test_store_converts_the_dtype() -> None:
    pool = KVPool(1, 2, 2, 1, 4, torch.bfloat16, CPU)
    pool.store(0, torch.full((1, 1, 4), 1.001), torch.full((1, 1, 4), 2.001), torch.tensor([3]))
    assert torch.equal(pool.layer(0)[0][1, 1], torch.ones(1, 4, dtype=torch.bfloat16))


def test_sizes() -> None:
    pool = KVPool(3, 7, 16, 2, 8, torch.bfloat16, CPU)
    assert pool.nbytes == 7 * KVPool.page_bytes(3, 16, 2, 8, torch.bfloat16) == 7 * 2 * 3 * 16 * 2 * 8 * 2


def test_a_token_takes_its_own_memory() -> None:
    """The first token of a large pool commits a memory page or two in each layer, not 2 MiB in each."""
    pool, k = KVPool(32, 1024, 16, 2, 64, torch.float32, CPU), torch.ones(1, 2, 64)
    before = psutil.Process().memory_info().rss
    for layer in range(32):
        pool.store(layer, k, k, torch.tensor([16]))
    assert psutil.Process().memory_info().rss - before < 16 << 20

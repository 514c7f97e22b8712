"""The order in which the decode rows of attention=triton start."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

from minisgl.plugins.attention.triton import DecodeOrder

CPU = torch.device("cpu")


def lengths(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, np.int32)


def test_long_rows_start_first() -> None:
    """The order lists each row once, the longest first, and rows of equal length in their own order."""
    order = DecodeOrder(CPU)
    order.reserve(8)
    order.update(lengths(5, 900, 5, 64))
    assert order.rows(4).tolist() == [1, 3, 0, 2]


def test_random_steps() -> None:
    """After any steps, with and without room for all rows, the order is one of the step's rows by length."""
    random, order = np.random.default_rng(0), DecodeOrder(CPU)
    order.reserve(16)
    lens = lengths()
    for _ in range(500):
        if random.random() < 0.5:
            lens = random.integers(1, 60, random.integers(0, 24)).astype(np.int32)
        else:
            lens = lens + np.int32(1)
        order.update(lens)
        rows = order.rows(len(lens)).numpy()
        assert sorted(rows) == list(range(len(lens)))
        assert (np.diff(lens[rows]) <= 0).all()


def test_an_order_that_fits_is_not_copied_again() -> None:
    """When all rows grow by one token, as in most steps, nothing is copied to the device."""
    order = DecodeOrder(CPU)
    order.reserve(4)
    order.update(lengths(3, 9))
    version = order.rows(2)._version
    order.update(lengths(4, 10))
    assert order.rows(2)._version == version
    order.update(lengths(11, 10))
    assert order.rows(2)._version > version
    assert order.rows(2).tolist() == [0, 1]


def test_recorded_launches_read_one_address() -> None:
    """A step with more rows than were reserved gets other memory, and the next recorded step the reserved memory."""
    order = DecodeOrder(CPU)
    order.reserve(3)
    order.update(lengths(1, 2, 3))
    address = order.rows(3).data_ptr()
    order.update(lengths(*range(1, 7)))
    assert order.rows(6).tolist() == [5, 4, 3, 2, 1, 0]
    assert order.rows(6).data_ptr() != address
    order.update(lengths(7, 8, 7))
    assert order.rows(3).data_ptr() == address
    assert order.rows(3).tolist() == [1, 0, 2]

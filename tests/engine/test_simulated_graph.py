"""The tape: what it records, what a replay does, and that each of its rules is found broken and named."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl.engine.simulated_graph import RULES, GraphViolation, record
from minisgl.kernel.launch import between_pieces, one_launch


@dataclass
class Inputs:
    x: Tensor


def inputs() -> Inputs:
    return Inputs(torch.arange(6.0).view(2, 3))


def test_a_replay_computes_on_what_the_inputs_hold_now() -> None:
    frame, weight = inputs(), torch.randn(3, 4)
    tape = record(lambda: torch.relu(frame.x @ weight).sum(dim=1), frame)
    address = tape.out.data_ptr()
    for _ in range(3):
        frame.x.copy_(torch.randn(2, 3))
        out = tape.replay()
        torch.testing.assert_close(out, torch.relu(frame.x @ weight).sum(dim=1))
        assert out.data_ptr() == address
    assert tape.replays == 3


def test_operations_are_launches_and_views_are_not() -> None:
    frame = inputs()
    tape = record(lambda: frame.x.view(3, 2).t()[1:].exp().reshape(-1).add_(1.0), frame)
    assert [operation.name for operation in tape.operations] == ["aten.exp.default", "aten.add_.Tensor"]
    assert all("test_simulated_graph.py:" in operation.where for operation in tape.operations)


def test_replays_write_into_memory_outside_and_allocate_once() -> None:
    frame, pool = inputs(), torch.zeros(5, 3)
    tape = record(lambda: pool.index_copy_(0, frame.x[:, 0].long(), frame.x).clone(), frame)
    pool.zero_()
    frame.x.copy_(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    tape.replay()
    assert pool[1].tolist() == [1.0, 2.0, 3.0]
    assert pool[4].tolist() == [4.0, 5.0, 6.0]
    assert not pool[[0, 2, 3]].any()


def test_what_a_launch_does_inside_is_its_own() -> None:
    """The host reads, the shapes differ, a new tensor comes back: one operation, done again at each replay."""
    frame, calls = inputs(), []

    @one_launch
    def launch(x: Tensor, out: Tensor) -> Tensor:
        calls.append(x[x > 2].tolist())
        out.copy_(x * 10)
        return x.sum(dim=0)

    def forward() -> Tensor:
        out = torch.empty(2, 3)
        total = launch(frame.x, out)
        return out + total

    tape = record(forward, frame)
    assert [operation.name.rpartition(".")[2] for operation in tape.operations] == ["launch", "Tensor"]
    frame.x.fill_(1.0)
    assert tape.replay().tolist() == [[12.0] * 3] * 2
    assert calls[-1] == []


def test_what_lies_between_pieces_is_called_anew_and_may_read_on_the_host() -> None:
    seen: list[int] = []

    @between_pieces
    def attend(x: Tensor, out: Tensor) -> None:
        seen.append(len(x.tolist()))
        out.copy_(x * factor[0])

    def forward(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        attend(x + 1, out)
        return out + 1

    factor, x = [2], torch.zeros(3)
    tape = record(partial(forward, x), x, piecewise=True)
    assert tape.replay().tolist() == [3, 3, 3]
    factor[0] = 5
    x.fill_(1)
    assert tape.replay().tolist() == [11, 11, 11]
    assert len(seen) == 4  # the recording, the check of it, and two replays
    with pytest.raises(GraphViolation, match="host-read"):  # recorded whole, it is a part like any other
        record(partial(forward, x), x)


def test_without_a_recorder_a_launch_is_a_plain_call() -> None:
    assert one_launch(lambda x: x + 1)(2) == 3


# ---- rules -------------------------------------------------------------------------------------------------


def reads() -> dict[str, Callable[[Tensor], object]]:
    return {
        "item": lambda x: x[0, 0].item(),
        "tolist": lambda x: x.tolist(),
        "bool": lambda x: bool(x[0, 1] > 0),
        "if": lambda x: 1 if x.sum() > 0 else 0,
        "int": lambda x: int(x[0, 0]),
        "float": lambda x: float(x[0, 0]),
        "index": lambda x: [10, 20][x[0, 1].long()],
        "numpy": lambda x: x.numpy(),
        "asarray": lambda x: np.asarray(x),
        "cpu": lambda x: x.cpu(),
        "in": lambda x: 3.0 in x,
        "print": lambda x: f"{x}",
        "equal": lambda x: torch.equal(x, x),
        "allclose": lambda x: x.allclose(x),
        "length of a range": lambda x: range(x[1, 0].int()),
    }


@pytest.mark.parametrize("name", reads())
def test_host_read(name: str) -> None:
    frame, read = inputs(), reads()[name]

    def forward() -> Tensor:
        read(frame.x)
        return frame.x + 1

    assert_broken("host-read", forward, frame, match="test_simulated_graph.py")


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor([1.0, 2.0, 3.0]),
        lambda: torch.as_tensor([1.0, 2.0, 3.0]),
        lambda: torch.from_numpy(np.ones(3, np.float32)),
    ],
    ids=["tensor", "as_tensor", "from_numpy"],
)
def test_host_data(make: Callable[[], Tensor]) -> None:
    frame = inputs()
    assert_broken("host-data", lambda: frame.x + make(), frame)


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x.nonzero(),
        lambda x: torch.where(x > 2)[0],
        lambda x: x[x > 2],
        lambda x: x.masked_select(x > 2),
        lambda x: x.unique(),
        lambda x: x.flatten().long().bincount(),
        lambda x: x.view(6).long().unique_consecutive(),
    ],
    ids=["nonzero", "where", "mask", "masked_select", "unique", "bincount", "unique_consecutive"],
)
def test_dynamic_shape(operation: Callable[[Tensor], Tensor]) -> None:
    frame = inputs()
    assert_broken("dynamic-shape", lambda: operation(frame.x) * 2, frame)


def test_dynamic_shape_of_repeats() -> None:
    frame = SimpleNamespace(x=torch.ones(3), repeats=torch.tensor([1, 2, 3]))
    assert_broken("dynamic-shape", lambda: frame.x.repeat_interleave(frame.repeats), frame)
    tape = record(lambda: frame.x.repeat_interleave(frame.repeats, output_size=6), frame)
    assert tape.replay().shape == (6,)


def test_dynamic_shape_of_a_launch_shows_at_the_replay() -> None:
    frame = inputs()

    @one_launch
    def above(x: Tensor) -> Tensor:
        return x[x > 2]

    tape = record(lambda: above(frame.x), frame)
    frame.x.zero_()
    with pytest.raises(GraphViolation, match=r"made \[0\] now, and \[3\] when recorded"):
        tape.replay()


def test_masks_that_keep_the_shape_are_allowed() -> None:
    frame = inputs()
    tape = record(lambda: torch.where(frame.x > 2, frame.x.masked_fill(frame.x > 4, 0.0), -1.0), frame)
    assert tape.replay().tolist() == [[-1.0, -1.0, -1.0], [3.0, 4.0, 0.0]]


def test_static_buffer_replaced() -> None:
    frame = inputs()
    tape = record(lambda: frame.x * 2, frame)
    frame.x = frame.x + 1
    with pytest.raises(GraphViolation, match=r"inputs\.x \[2, 3\] is another tensor now") as caught:
        tape.replay()
    assert caught.value.rule == "static-buffer"


def test_static_buffer_resized() -> None:
    frame, hidden = inputs(), torch.ones(3)
    tape = record(lambda: frame.x * hidden, frame)
    hidden.resize_(1, 3)
    with pytest.raises(GraphViolation, match=r"is \[1, 3\] .* recorded as \[3\]"):
        tape.replay()


def test_static_buffer_in_an_object_without_annotations() -> None:
    frame = SimpleNamespace(parts=({"x": torch.ones(2)}, [torch.ones(2)]))
    tape = record(lambda: frame.parts[0]["x"] + frame.parts[1][0], frame)
    frame.parts[1][0] = torch.zeros(2)
    with pytest.raises(GraphViolation, match=r"inputs\.parts\[1\]\[0\]"):
        tape.replay()


def test_escaped_memory() -> None:
    frame, kept = inputs(), []

    def forward() -> Tensor:
        y = frame.x * 2
        kept.append(y[0])
        return y + 1

    assert_broken("escaped-memory", forward, frame, match=r"aten\.select\.int at .*test_simulated_graph\.py")


def test_unrecorded_work() -> None:
    """A kernel is launched on addresses, and torch sees nothing of it: here memmove stands for one."""
    frame = inputs()

    def forward() -> Tensor:
        y = torch.empty(2, 3)
        ctypes.memmove(y.data_ptr(), frame.x.data_ptr(), y.nbytes)
        return y + 1

    assert_broken("unrecorded-work", forward, frame)


def assert_broken(rule: str, forward: Callable[[], Tensor], frame: object, match: str | None = None) -> None:
    with pytest.raises(GraphViolation, match=match) as caught:
        record(forward, frame)
    assert caught.value.rule == rule
    assert RULES[rule] in str(caught.value)

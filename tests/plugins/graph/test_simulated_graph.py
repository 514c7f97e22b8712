"""Tests of simulated graphs: recorded operations, replays, and a `GraphViolation` for each broken rule."""

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

from minisgl.plugins.graph.replaying.simulated_graph import RULES, GraphViolation, record
from minisgl.plugins.kernels.ops.launch import between_pieces
from minisgl.utils.launch import one_launch


@dataclass
class Inputs:
    x: Tensor


def make_inputs() -> Inputs:
    return Inputs(torch.arange(6.0).view(2, 3))


def test_replay_reads_current_inputs() -> None:
    """A replay computes on the current contents of the inputs, and writes the result into the same tensor."""
    inputs, weight = make_inputs(), torch.randn(3, 4)
    graph = record(lambda: torch.relu(inputs.x @ weight).sum(dim=1), inputs)
    address = graph.out.data_ptr()
    for _ in range(3):
        inputs.x.copy_(torch.randn(2, 3))
        out = graph.replay()
        torch.testing.assert_close(out, torch.relu(inputs.x @ weight).sum(dim=1))
        assert out.data_ptr() == address
    assert graph.replays == 3


def test_views_are_not_recorded() -> None:
    """Operations that launch a kernel are recorded with their source line; views are not recorded."""
    inputs = make_inputs()
    graph = record(lambda: inputs.x.view(3, 2).t()[1:].exp().reshape(-1).add_(1.0), inputs)
    assert [operation.name for operation in graph.operations] == ["aten.exp.default", "aten.add_.Tensor"]
    assert all("test_simulated_graph.py:" in operation.source_line for operation in graph.operations)


def test_replay_writes_external_memory() -> None:
    """A replay writes into tensors that existed before the recording, such as a KV pool."""
    inputs, pool = make_inputs(), torch.zeros(5, 3)
    graph = record(lambda: pool.index_copy_(0, inputs.x[:, 0].long(), inputs.x).clone(), inputs)
    pool.zero_()
    inputs.x.copy_(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    graph.replay()
    assert pool[1].tolist() == [1.0, 2.0, 3.0]
    assert pool[4].tolist() == [4.0, 5.0, 6.0]
    assert not pool[[0, 2, 3]].any()


def test_one_launch_is_one_operation() -> None:
    """A function marked `one_launch` is one operation, called again at each replay; rules do not apply to its body."""
    inputs, calls = make_inputs(), []

    @one_launch
    def launch(x: Tensor, out: Tensor) -> Tensor:
        calls.append(x[x > 2].tolist())
        out.copy_(x * 10)
        return x.sum(dim=0)

    def forward() -> Tensor:
        out = torch.empty(2, 3)
        total = launch(inputs.x, out)
        return out + total

    graph = record(forward, inputs)
    assert [operation.name.rpartition(".")[2] for operation in graph.operations] == ["launch", "Tensor"]
    inputs.x.fill_(1.0)
    assert graph.replay().tolist() == [[12.0] * 3] * 2
    assert calls[-1] == []


def test_calls_between_pieces() -> None:
    """A function marked `between_pieces` is called again at each replay in pieces, and may read values on the host."""
    lengths: list[int] = []

    @between_pieces
    def attend(x: Tensor, out: Tensor) -> None:
        lengths.append(len(x.tolist()))
        out.copy_(x * factor[0])

    def forward(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        attend(x + 1, out)
        return out + 1

    factor, x = [2], torch.zeros(3)
    graph = record(partial(forward, x), x, piecewise=True)
    assert graph.replay().tolist() == [3, 3, 3]
    factor[0] = 5
    x.fill_(1)
    assert graph.replay().tolist() == [11, 11, 11]
    assert len(lengths) == 4  # the recording, its check, and two replays
    with pytest.raises(GraphViolation, match="host-read"):  # not in pieces: the rules apply to it
        record(partial(forward, x), x)


def test_one_launch_without_recorder() -> None:
    """Without a recorder, a function marked `one_launch` is called as usual."""
    assert one_launch(lambda x: x + 1)(2) == 3


# ---- rules -------------------------------------------------------------------------------------------------


def reads() -> dict[str, Callable[[Tensor], object]]:
    """Return functions that read a tensor's value on the host, by name."""
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
    """Every way to read a tensor's value on the host breaks the rule ``host-read``."""
    inputs, read = make_inputs(), reads()[name]

    def forward() -> Tensor:
        read(inputs.x)
        return inputs.x + 1

    assert_broken("host-read", forward, inputs, match="test_simulated_graph.py")


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
    """Tensors made from host values break the rule ``host-data``."""
    inputs = make_inputs()
    assert_broken("host-data", lambda: inputs.x + make(), inputs)


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
    """Operations whose result shape depends on values break the rule ``dynamic-shape``."""
    inputs = make_inputs()
    assert_broken("dynamic-shape", lambda: operation(inputs.x) * 2, inputs)


def test_dynamic_shape_of_repeat_interleave() -> None:
    """`repeat_interleave` with a tensor of repeats is allowed only with ``output_size``."""
    inputs = SimpleNamespace(x=torch.ones(3), repeats=torch.tensor([1, 2, 3]))
    assert_broken("dynamic-shape", lambda: inputs.x.repeat_interleave(inputs.repeats), inputs)
    graph = record(lambda: inputs.x.repeat_interleave(inputs.repeats, output_size=6), inputs)
    assert graph.replay().shape == (6,)


def test_dynamic_shape_of_one_launch() -> None:
    """A `one_launch` function whose result changes its shape breaks ``dynamic-shape`` at the replay."""
    inputs = make_inputs()

    @one_launch
    def above(x: Tensor) -> Tensor:
        return x[x > 2]

    graph = record(lambda: above(inputs.x), inputs)
    inputs.x.zero_()
    with pytest.raises(GraphViolation, match=r"made the shape \[0\] in this replay; in the recording it made \[3\]"):
        graph.replay()


def test_masks_are_allowed() -> None:
    """Masks that keep the shape break no rule."""
    inputs = make_inputs()
    graph = record(lambda: torch.where(inputs.x > 2, inputs.x.masked_fill(inputs.x > 4, 0.0), -1.0), inputs)
    assert graph.replay().tolist() == [[-1.0, -1.0, -1.0], [3.0, 4.0, 0.0]]


def test_static_buffer_replaced() -> None:
    """An input tensor that was replaced breaks the rule ``static-buffer`` at the next replay."""
    inputs = make_inputs()
    graph = record(lambda: inputs.x * 2, inputs)
    inputs.x = inputs.x + 1
    with pytest.raises(GraphViolation, match=r"inputs\.x \[2, 3\] is another tensor now") as caught:
        graph.replay()
    assert caught.value.rule == "static-buffer"


def test_static_buffer_resized() -> None:
    """A tensor that was resized breaks the rule ``static-buffer`` at the next replay."""
    inputs, hidden = make_inputs(), torch.ones(3)
    graph = record(lambda: inputs.x * hidden, inputs)
    hidden.resize_(1, 3)
    with pytest.raises(GraphViolation, match=r"is \[1, 3\] .* recorded as \[3\]"):
        graph.replay()


def test_static_buffer_in_nested_objects() -> None:
    """Input tensors are found in nested objects, tuples, lists and dicts, and named by their path."""
    inputs = SimpleNamespace(parts=({"x": torch.ones(2)}, [torch.ones(2)]))
    graph = record(lambda: inputs.parts[0]["x"] + inputs.parts[1][0], inputs)
    inputs.parts[1][0] = torch.zeros(2)
    with pytest.raises(GraphViolation, match=r"inputs\.parts\[1\]\[0\]"):
        graph.replay()


def test_escaped_memory() -> None:
    """A tensor of the forward pass that is kept afterwards breaks the rule ``escaped-memory``."""
    inputs, kept = make_inputs(), []

    def forward() -> Tensor:
        y = inputs.x * 2
        kept.append(y[0])
        return y + 1

    assert_broken("escaped-memory", forward, inputs, match=r"aten\.select\.int at .*test_simulated_graph\.py")


def test_unrecorded_work() -> None:
    """A kernel launched on raw addresses, here memmove, is not recorded and breaks the rule ``unrecorded-work``."""
    inputs = make_inputs()

    def forward() -> Tensor:
        y = torch.empty(2, 3)
        ctypes.memmove(y.data_ptr(), inputs.x.data_ptr(), y.nbytes)
        return y + 1

    assert_broken("unrecorded-work", forward, inputs)


def assert_broken(rule: str, forward: Callable[[], Tensor], inputs: object, match: str | None = None) -> None:
    """Assert that recording ``forward`` raises a `GraphViolation` of ``rule``, with the rule's text."""
    with pytest.raises(GraphViolation, match=match) as caught:
        record(forward, inputs)
    assert caught.value.rule == rule
    assert RULES[rule] in str(caught.value)

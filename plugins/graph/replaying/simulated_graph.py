"""Simulated graph: a CPU replacement for CUDA graphs that records torch operations and replays them in the same memory.

It enforces the rules of CUDA graphs (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs). Code that
breaks a rule raises a `GraphViolation` that names the rule; on a GPU, the same code may compute wrong results without
an error. The module knows torch's operations and `minisgl.utils.launch.one_launch`, and no model.
"""

from __future__ import annotations

import gc
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from minisgl.plugins.kernels.ops.fp8 import QuantizedRows
from minisgl.plugins.kernels.ops.launch import recording

__all__ = ["RULES", "GraphViolation", "SimulatedGraph", "record"]

RULES = {
    "host-read": "The forward pass must not read a tensor's value on the host: a replay does not run the host's code.",
    "host-data": "The forward pass must not create a tensor from host values: a replay would copy freed host memory.",
    "dynamic-shape": "No shape may depend on a tensor's values: a replay launches the same kernels on the same shapes.",
    "static-buffer": "Input tensors must keep their memory: write into them (copy_), never replace or resize them.",
    "escaped-memory": "Tensors made in the forward pass, except its result, must not be kept: replays overwrite them.",
    "unrecorded-work": "All work must be torch operations or functions marked one_launch: no other work is recorded.",
}

# An argument of a function marked `one_launch` whose tensors the recorder must see.
pytree.register_pytree_node(
    QuantizedRows,
    lambda rows: ([rows.values, rows.factors], rows.dtype),
    lambda tensors, dtype: QuantizedRows(*tensors, dtype),  # type: ignore[call-arg]
)


class GraphViolation(RuntimeError):  # noqa: N818 - named like SimViolation of the simulated engine
    """A recorded forward pass, or a change between its replays, broke a rule. ``rule`` is a key of `RULES`."""

    def __init__(self, rule: str, text: str):
        self.rule, self.text = rule, text
        super().__init__(f"[{rule}] {text}\n  The rule: {RULES[rule]}")


class Operation(NamedTuple):
    """One recorded operation: ``function(*args, **kwargs)``, whose new tensors are stored in ``targets``."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: tuple[Tensor, ...]
    writes_target: bool  # the function writes its result into the target itself (through ``out=``)
    source_line: str  # file and line of the call, for error messages


class MemoryLayout(NamedTuple):
    """Address, shape, strides and dtype of a tensor. Two tensors with equal layouts are the same memory."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(x: Tensor) -> MemoryLayout:
        """Return the layout of tensor x."""
        return MemoryLayout(x.data_ptr(), tuple(x.shape), x.stride(), x.dtype)


class SimulatedGraph:
    """Recorded operations of a forward pass. ``out`` is the recorded result: the same tensor in every replay."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.replays = 0
        self.out: Tensor
        self._inputs: Any = None
        self._input_layouts: dict[str, MemoryLayout] = {}
        # Tensors that operations use and that existed before the recording, by `id`: weights, KV pool, inputs.
        self._external: dict[int, tuple[Tensor, MemoryLayout]] = {}

    def replay(self) -> Tensor:
        """Run the recorded operations on the current contents of the inputs, and return ``out``.

        Raises `GraphViolation` if an input tensor was replaced or resized, or if a result has another shape than in
        the recording.
        """
        self._check_buffers()
        with torch.inference_mode():
            for operation in self.operations:
                made = operation.function(*operation.args, **operation.kwargs)
                if operation.targets and not operation.writes_target:
                    self._store(operation, made)
        self.replays += 1
        return self.out

    def _store(self, operation: Operation, made: Any) -> None:
        """Copy the new tensors of an operation into the memory that the recording has for them."""
        targets = iter(operation.targets)
        for x in _tensors(made):
            if not _shares_storage(x, operation.args, operation.kwargs):
                target = next(targets)
                if x.shape != target.shape:
                    now, recorded = list(x.shape), list(target.shape)
                    raise GraphViolation(
                        "dynamic-shape",
                        f"{operation.name} at {operation.source_line} made the shape {now} in this replay; in the "
                        f"recording it made {recorded}.",
                    )
                target.copy_(x)

    def _check_buffers(self) -> None:
        """Raise `GraphViolation` if an input or another external tensor no longer has its recorded layout."""
        layouts = {name: MemoryLayout.of(x) for name, x in _named_tensors(self._inputs)}
        for name, recorded in self._input_layouts.items():
            if layouts.get(name) != recorded:
                raise GraphViolation("static-buffer", _layout_change(name, recorded, layouts.get(name)))
        for x, recorded in self._external.values():
            if MemoryLayout.of(x) != recorded:
                text = _layout_change("A tensor that was recorded", recorded, MemoryLayout.of(x))
                raise GraphViolation("static-buffer", text)


def record(forward: Callable[[], Tensor], inputs: Any = None, *, piecewise: bool = False) -> SimulatedGraph:
    """Run ``forward`` once and record its operations.

    ``inputs`` is an object, or objects in tuples, lists, dicts and dataclasses. `SimulatedGraph.replay` checks that
    each tensor in ``inputs`` still has the same address, shape, strides and dtype. With ``piecewise``, functions marked
    `minisgl.plugins.kernels.ops.launch.between_pieces` may break any rule inside. Raises `GraphViolation`.
    """
    graph = SimulatedGraph()
    recorder = _Recorder(graph)
    with torch.inference_mode():
        with recording(recorder.launch, recorder.launch if piecewise else None), _HostReads(recorder), recorder:
            out = forward()
        graph.out = recorder.detached(out)
        recorder.check_escapes(out)
        graph._inputs = inputs
        graph._input_layouts = {name: MemoryLayout.of(x) for name, x in _named_tensors(inputs)}
        _check_replay(graph, recorder.allocated)
    return graph


def _check_replay(graph: SimulatedGraph, allocated: dict[int, Tensor]) -> None:
    """Raise `GraphViolation` unless a replay reproduces the recorded result from overwritten memory.

    A different result means that ``forward`` did work that torch did not dispatch, so the work was not recorded.
    ``allocated`` is the memory that the recording allocated. The check fills it with NaN or 0 before the replay.
    """
    expected = graph.out.clone()
    for memory in allocated.values():
        memory.fill_(float("nan") if memory.is_floating_point() else 0)
    try:
        same = torch.equal(graph.replay().nan_to_num(), expected.nan_to_num())
        same = same and torch.equal(graph.out.isnan(), expected.isnan())
    except (IndexError, RuntimeError) as error:
        if isinstance(error, GraphViolation):
            raise
        raise GraphViolation("unrecorded-work", f"The first replay failed: {error}") from error
    if not same:
        raise GraphViolation(
            "unrecorded-work", "The first replay, on the same inputs, gave another result than the recording."
        )
    graph.replays = 0


class _Recorder(TorchDispatchMode):
    """Dispatch mode that records every operation that torch dispatches, and every call of a marked function."""

    def __init__(self, graph: SimulatedGraph) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = graph
        self.allocated: dict[int, Tensor] = {}  # id of a storage allocated during the recording -> all its memory
        # Tensors made during the recording, with the operation's name and source line.
        self.made: list[tuple[weakref.ref[Tensor], str, str]] = []
        self.active = True  # False inside a function that is recorded as one operation

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the base class would import torch's compiler, which takes a second and is not needed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.active:
            return func(*args, **kwargs)
        if func.name() in _HOST_READS:
            raise GraphViolation("host-read", f"{func} at {_source_line()} reads a tensor's value.")
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:  # a composite operation: record the operations it consists of, as a device would run them
                return func.decompose(*args, **kwargs)
        _check(func, args, kwargs)
        made = func(*args, **kwargs)
        self._append(str(func), func, args, kwargs, made, func._schema.is_mutable)
        return made

    def launch(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function marked `one_launch` and record the call as one operation, without rules for its body."""
        if not self.active:
            return function(*args, **kwargs)
        self.active = False
        try:
            made = function(*args, **kwargs)
            self._append(function.__qualname__, function, args, kwargs, made, True)
        finally:
            self.active = True
        return made

    def detached(self, x: Tensor) -> Tensor:
        """Return a separate tensor object for memory that was allocated during the recording; else return x itself.

        The graph must not hold the tensor objects of the forward pass, because `check_escapes` tests whether anything
        else still holds them.
        """
        return x.detach() if x.untyped_storage()._cdata in self.allocated else x

    def _append(
        self, name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any, has_effect: bool
    ) -> None:
        """Append an operation that has just been run, with its result ``made``, to the graph.

        ``has_effect`` is True if the operation must be replayed even if it makes no new tensor.
        """
        source_line = _source_line()
        for x in _tensors((args, kwargs)):
            if x.untyped_storage()._cdata not in self.allocated:
                self.graph._external.setdefault(id(x), (x, MemoryLayout.of(x)))
        args, kwargs = pytree.tree_map_only(Tensor, self.detached, (args, kwargs))
        targets = []
        for x in _tensors(made):
            if not _shares_storage(x, args, kwargs):
                storage = x.untyped_storage()
                self.allocated.setdefault(storage._cdata, _whole_storage(x))
                targets.append(x.detach())
            if x.untyped_storage()._cdata in self.allocated:
                self.made.append((weakref.ref(x), name, source_line))
        if (not targets and not has_effect) or name in _ALLOCATIONS:
            return  # a view or an uninitialised allocation launches no kernel
        out_variant = None if has_effect else _out_variant(function, targets)
        call = (out_variant or function, args, {**kwargs, "out": targets[0]} if out_variant else kwargs)
        self.graph.operations.append(Operation(name, *call, tuple(targets), out_variant is not None, source_line))

    def check_escapes(self, out: Tensor) -> None:
        """Raise `GraphViolation` if a tensor made during the recording, other than ``out``, is still referenced."""

        def alive() -> list[tuple[str, str]]:
            return [(name, line) for ref, name, line in self.made if ref() is not None and ref() is not out]

        for pause in (0.0, 0.01, 0.1, 0.5):  # seconds: gloo's thread drops sent tensors shortly after the send is done
            if not alive():
                return
            gc.collect()
            time.sleep(pause)
        for name, line in alive():
            raise GraphViolation(
                "escaped-memory", f"The result of {name} at {line} is still referenced after the forward pass."
            )


class _HostReads(TorchFunctionMode):
    """Function mode that detects what torch does not dispatch: host reads, and tensors made from host values.

    On a CPU, for example, tolist and numpy read memory directly.
    """

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.recorder.active:
            name = (resolve_name(func) or "").removeprefix("torch.")
            if name in _HOST_MAKES:
                raise GraphViolation("host-data", f"{name} at {_source_line()} makes a tensor from host values.")
            if name in _HOST_METHODS:
                raise GraphViolation("host-read", f"{name} at {_source_line()} reads a tensor's value.")
        return func(*args, **(kwargs or {}))


# ---- classes of operations --------------------------------------------------------------------------------

_HOST_METHODS = frozenset(
    f"Tensor.{name}"
    for name in (
        "item", "tolist", "numpy", "cpu", "__array__", "__bool__", "__int__", "__float__", "__complex__", "__index__",
        "__contains__", "__dlpack__", "__repr__", "__format__", "is_nonzero", "equal", "allclose",
    )
) | {"equal", "allclose", "is_nonzero"}  # fmt: skip
_HOST_READS = frozenset(
    {"aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::allclose"}
)
_HOST_MAKES = frozenset({"tensor", "as_tensor", "asarray", "from_numpy", "frombuffer"})
_HOST_DATA = frozenset({"aten.lift_fresh.default", "aten.lift.default", "aten.lift_fresh_copy.default"})
_ALLOCATIONS = frozenset(
    f"aten.{name}"
    for name in (
        "empty.memory_format", "empty_like.default", "empty_strided.default", "new_empty.default",
        "new_empty_strided.default", "empty_permuted.default",
    )
)  # fmt: skip


def _check(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise `GraphViolation` for an operation that needs the host: its data comes from the host, or its shape does."""
    name = str(func)
    if name in _HOST_DATA:
        raise GraphViolation("host-data", f"At {_source_line()} a tensor is made from host values.")
    dynamic = torch.Tag.dynamic_output_shape in func.tags
    if name.startswith(("aten.index.", "aten.index_put", "aten._unsafe_index.")):
        dynamic = any(x.dtype in (torch.bool, torch.uint8) for x in _tensors(args[1]))
    if name == "aten.repeat_interleave.Tensor":
        dynamic = kwargs.get("output_size") is None
    if dynamic or name == "aten.bincount.default":
        raise GraphViolation("dynamic-shape", f"The shape of {name}'s result at {_source_line()} depends on values.")


def _out_variant(function: Any, targets: list[Tensor]) -> Any:
    """Return the overload of an operation that writes its single result into ``out``, or None if there is none."""
    if len(targets) != 1 or len(function._schema.returns) != 1:
        return None
    arguments = [(a.name, str(a.type)) for a in function._schema.arguments]
    for name in function.overloadpacket.overloads():
        overload = getattr(function.overloadpacket, name)
        inputs = [(a.name, str(a.type)) for a in overload._schema.arguments if not a.is_out]
        outs = [a.name for a in overload._schema.arguments if a.is_out]
        if outs == ["out"] and inputs == arguments:
            return overload
    return None


# ---- tensors ----------------------------------------------------------------------------------------------


def _tensors(tree: Any) -> list[Tensor]:
    """Return all tensors in a nest of tuples, lists and dicts."""
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def _shares_storage(x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether x is in the same storage as one of the arguments."""
    storage = x.untyped_storage()._cdata
    return any(y.untyped_storage()._cdata == storage for y in _tensors((args, kwargs)))


def _whole_storage(x: Tensor) -> Tensor:
    """Return the whole storage of x as a one-dimensional tensor."""
    count = x.untyped_storage().nbytes() // x.element_size()
    return x.detach().as_strided((count,), (1,), 0)


def _named_tensors(tree: Any, name: str = "inputs", depth: int = 4) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in a nest of objects, up to ``depth`` levels, with its path, such as ``inputs.parts[1]``."""
    if isinstance(tree, Tensor):
        yield name, tree
    elif depth == 0 or tree is None or isinstance(tree, (str, bytes, int, float)):
        return
    elif isinstance(tree, tuple) and hasattr(tree, "_fields"):
        for key, value in zip(tree._fields, tree, strict=True):
            yield from _named_tensors(value, f"{name}.{key}", depth - 1)
    elif isinstance(tree, (tuple, list)):
        for i, value in enumerate(tree):
            yield from _named_tensors(value, f"{name}[{i}]", depth - 1)
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from _named_tensors(value, f"{name}[{key!r}]", depth - 1)
    elif is_dataclass(tree):
        for field in fields(tree):
            yield from _named_tensors(getattr(tree, field.name), f"{name}.{field.name}", depth - 1)
    elif type(tree).__module__.partition(".")[0] not in ("torch", "numpy", "builtins"):
        for key, value in getattr(tree, "__dict__", {}).items():
            yield from _named_tensors(value, f"{name}.{key}", depth - 1)


# ---- messages ----------------------------------------------------------------------------------------------


def _layout_change(name: str, recorded: MemoryLayout, now: MemoryLayout | None) -> str:
    """Describe how the tensor ``name`` differs from its recorded layout. ``now`` is None if the tensor is missing."""
    if now is None:
        return f"{name} is missing; it was recorded as {list(recorded.shape)}."
    if now._replace(address=recorded.address) == recorded:
        return f"{name} {list(recorded.shape)} is another tensor now: it was replaced after it was recorded."
    return f"{name} is {list(now.shape)} {now.dtype} now; it was recorded as {list(recorded.shape)} {recorded.dtype}."


def _source_line() -> str:
    """Return file and line of the innermost stack frame that is neither torch's nor this module's."""
    skipped = (str(Path(torch.__file__).parent), __file__)
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(skipped) and "functools" not in frame.filename:
            return f"{'/'.join(Path(frame.filename).parts[-3:])}:{frame.lineno}"
    return "an unknown source line"

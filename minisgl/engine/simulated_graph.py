"""A graph's stand-in on a CPU: the operations of a forward pass, recorded once and replayed into the same memory.

It keeps the rules of CUDA graphs (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs) and says which one
was broken, where a GPU would read stale memory in silence. Knows torch's operations and `one_launch`, and no model.
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

from minisgl.kernel.launch import recording

__all__ = ["RULES", "GraphViolation", "Tape", "record"]

RULES = {
    "host-read": "The host reads no value of the device inside: what it did with it would not be done again.",
    "host-data": "No tensor is made from the host's values inside: a replay would copy memory that is gone.",
    "dynamic-shape": "No shape inside depends on values: a replay launches the same kernels on the same shapes.",
    "static-buffer": "Inputs stay where they were recorded: write into them (copy_), never replace or resize them.",
    "escaped-memory": "What is made inside, other than the result, is not kept: each replay overwrites it.",
    "unrecorded-work": "All work inside is torch's, or marked with one_launch: what is not seen is not replayed.",
}


class GraphViolation(RuntimeError):  # noqa: N818 - as the simulated engine's violations are called
    """A recorded forward pass, or the way it is replayed, broke a rule. ``rule`` is a key of `RULES`."""

    def __init__(self, rule: str, text: str):
        self.rule, self.text = rule, text
        super().__init__(f"[{rule}] {text}\n  The rule: {RULES[rule]}")


class Operation(NamedTuple):
    """One recorded launch: ``function(*args, **kwargs)``, whose new tensors go to ``targets``."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: tuple[Tensor, ...]
    into: bool  # the function has been given the target and writes into it
    where: str


class Place(NamedTuple):
    """Where a tensor lies, and as what."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(x: Tensor) -> Place:
        return Place(x.data_ptr(), tuple(x.shape), x.stride(), x.dtype)


class Tape:
    """Recorded operations. ``out`` is the recorded result: the same tensor in every replay."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.replays = 0
        self.out: Tensor
        self._inputs: Any = None
        self._input_places: dict[str, Place] = {}
        self._outside: dict[int, tuple[Tensor, Place]] = {}

    def replay(self) -> Tensor:
        """Run the recorded operations on what their inputs hold now. Raises `GraphViolation`."""
        self._check_buffers()
        with torch.inference_mode():
            for operation in self.operations:
                made = operation.function(*operation.args, **operation.kwargs)
                if operation.targets and not operation.into:
                    self._keep(operation, made)
        self.replays += 1
        return self.out

    def _keep(self, operation: Operation, made: Any) -> None:
        """Put what was made where the recording has it."""
        targets = iter(operation.targets)
        for x in _tensors(made):
            if not _shares(x, operation.args, operation.kwargs):
                target = next(targets)
                if x.shape != target.shape:
                    shapes = f"{list(x.shape)} now, and {list(target.shape)} when recorded"
                    raise GraphViolation("dynamic-shape", f"{operation.name} at {operation.where} made {shapes}.")
                target.copy_(x)

    def _check_buffers(self) -> None:
        found = {name: Place.of(x) for name, x in _buffers(self._inputs)}
        for name, place in self._input_places.items():
            if found.get(name) != place:
                raise GraphViolation("static-buffer", _moved(name, place, found.get(name)))
        for x, place in self._outside.values():
            if Place.of(x) != place:
                raise GraphViolation("static-buffer", _moved("A tensor that was recorded", place, Place.of(x)))


def record(forward: Callable[[], Tensor], inputs: Any = None, *, piecewise: bool = False) -> Tape:
    """Run ``forward`` once and keep its operations. ``inputs``: an object, or objects in tuples, lists, dicts and
    dataclasses, whose tensors `Tape.replay` expects to find where they are now. In ``piecewise``, what is marked
    `minisgl.kernel.launch.between_pieces` need keep no rule. Raises `GraphViolation`."""
    tape = Tape()
    recorder = _Recorder(tape)
    with torch.inference_mode():
        with recording(recorder.launch, recorder.launch if piecewise else None), _HostReads(recorder), recorder:
            out = forward()
        tape.out = recorder.own(out)
        recorder.check_escapes(out)
        tape._inputs = inputs
        tape._input_places = {name: Place.of(x) for name, x in _buffers(inputs)}
        _check_replay(tape, recorder.inside)
    return tape


def _check_replay(tape: Tape, inside: dict[int, Tensor]) -> None:
    """A replay must make from nothing what was recorded: else some work was done that torch did not see."""
    expected = tape.out.clone()
    for memory in inside.values():
        memory.fill_(float("nan") if memory.is_floating_point() else 0)
    try:
        same = torch.equal(tape.replay().nan_to_num(), expected.nan_to_num())
        same = same and torch.equal(tape.out.isnan(), expected.isnan())
    except (IndexError, RuntimeError) as error:
        if isinstance(error, GraphViolation):
            raise
        raise GraphViolation("unrecorded-work", f"The first replay failed: {error}") from error
    if not same:
        raise GraphViolation("unrecorded-work", "The first replay, on the same inputs, did not give the same result.")
    tape.replays = 0


class _Recorder(TorchDispatchMode):
    """Sees every operation that torch dispatches, and every marked launch, and writes them on the tape."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape
        self.inside: dict[int, Tensor] = {}  # storage -> memory made inside
        self.made: list[tuple[weakref.ref[Tensor], str, str]] = []
        self.seeing = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and torch's compiler would take a second to import

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.seeing:
            return func(*args, **kwargs)
        if func.name() in _HOST_READS:
            raise GraphViolation("host-read", f"{func} at {_where()} reads a tensor's value.")
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:  # made of other operations: those are what a device would run
                return func.decompose(*args, **kwargs)
        _check(func, args, kwargs)
        made = func(*args, **kwargs)
        self._write(str(func), func, args, kwargs, made, func._schema.is_mutable)
        return made

    def launch(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a function marked with `one_launch`: what it does inside is its own business."""
        if not self.seeing:
            return function(*args, **kwargs)
        self.seeing = False
        try:
            made = function(*args, **kwargs)
            self._write(function.__qualname__, function, args, kwargs, made, True)
        finally:
            self.seeing = True
        return made

    def own(self, x: Tensor) -> Tensor:
        """The tape's own handle of a tensor's memory: it must not keep alive what the forward pass let go."""
        return x.detach() if x.untyped_storage()._cdata in self.inside else x

    def _write(
        self, name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any, acts: bool
    ) -> None:
        """Keep a call that was made. ``acts``: it does something even if it makes no new tensor."""
        where = _where()
        for x in _tensors((args, kwargs)):
            if x.untyped_storage()._cdata not in self.inside:
                self.tape._outside.setdefault(id(x), (x, Place.of(x)))
        args, kwargs = pytree.tree_map_only(Tensor, self.own, (args, kwargs))
        targets = []
        for x in _tensors(made):
            if not _shares(x, args, kwargs):
                memory = x.untyped_storage()
                self.inside.setdefault(memory._cdata, _whole(x))
                targets.append(x.detach())
            if x.untyped_storage()._cdata in self.inside:
                self.made.append((weakref.ref(x), name, where))
        if (not targets and not acts) or name in _ALLOCATIONS:
            return  # a view, or memory without contents: nothing is launched
        into = None if acts else _out_variant(function, targets)
        kept = (into or function, args, {**kwargs, "out": targets[0]} if into else kwargs)
        self.tape.operations.append(Operation(name, *kept, tuple(targets), into is not None, where))

    def check_escapes(self, out: Tensor) -> None:
        def alive() -> list[tuple[str, str]]:
            return [(name, where) for ref, name, where in self.made if ref() is not None and ref() is not out]

        for pause in (0.0, 0.01, 0.1, 0.5):  # gloo's thread lets go of what it sent a moment after it said so
            if not alive():
                return
            gc.collect()
            time.sleep(pause)
        for name, where in alive():
            raise GraphViolation("escaped-memory", f"The result of {name} at {where} is still held after the pass.")


class _HostReads(TorchFunctionMode):
    """Sees what torch does not dispatch: on a CPU, tolist and numpy look at memory directly."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.recorder.seeing:
            name = (resolve_name(func) or "").removeprefix("torch.")
            if name in _HOST_MAKES:
                raise GraphViolation("host-data", f"{name} at {_where()} makes a tensor from values of the host.")
            if name in _HOST_METHODS:
                raise GraphViolation("host-read", f"{name} at {_where()} reads a tensor's value.")
        return func(*args, **(kwargs or {}))


# ---- what operations are -----------------------------------------------------------------------------------

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
    """Refuse what a device could do only with the host's help."""
    name = str(func)
    if name in _HOST_DATA:
        raise GraphViolation("host-data", f"At {_where()} a tensor is made from values of the host.")
    dynamic = torch.Tag.dynamic_output_shape in func.tags
    if name.startswith(("aten.index.", "aten.index_put", "aten._unsafe_index.")):
        dynamic = any(x.dtype in (torch.bool, torch.uint8) for x in _tensors(args[1]))
    if name == "aten.repeat_interleave.Tensor":
        dynamic = kwargs.get("output_size") is None
    if dynamic or name == "aten.bincount.default":
        raise GraphViolation("dynamic-shape", f"The shape of {name}'s result at {_where()} depends on values.")


def _out_variant(function: Any, targets: list[Tensor]) -> Any:
    """The overload of an operation that writes its one result into ``out``, if there is one."""
    if len(targets) != 1 or len(function._schema.returns) != 1:
        return None
    wanted = [(a.name, str(a.type)) for a in function._schema.arguments]
    for name in function.overloadpacket.overloads():
        other = getattr(function.overloadpacket, name)
        plain = [(a.name, str(a.type)) for a in other._schema.arguments if not a.is_out]
        outs = [a.name for a in other._schema.arguments if a.is_out]
        if outs == ["out"] and plain == wanted:
            return other
    return None


# ---- tensors ----------------------------------------------------------------------------------------------


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def _shares(x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether x lies in the memory of one of the arguments."""
    storage = x.untyped_storage()._cdata
    return any(y.untyped_storage()._cdata == storage for y in _tensors((args, kwargs)))


def _whole(x: Tensor) -> Tensor:
    """All of the memory that x lies in, as one row."""
    count = x.untyped_storage().nbytes() // x.element_size()
    return x.detach().as_strided((count,), (1,), 0)


def _buffers(tree: Any, name: str = "inputs", depth: int = 4) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in a tree of objects, with its path."""
    if isinstance(tree, Tensor):
        yield name, tree
    elif depth == 0 or tree is None or isinstance(tree, (str, bytes, int, float)):
        return
    elif isinstance(tree, tuple) and hasattr(tree, "_fields"):
        for key, value in zip(tree._fields, tree, strict=True):
            yield from _buffers(value, f"{name}.{key}", depth - 1)
    elif isinstance(tree, (tuple, list)):
        for i, value in enumerate(tree):
            yield from _buffers(value, f"{name}[{i}]", depth - 1)
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from _buffers(value, f"{name}[{key!r}]", depth - 1)
    elif is_dataclass(tree):
        for field in fields(tree):
            yield from _buffers(getattr(tree, field.name), f"{name}.{field.name}", depth - 1)
    elif type(tree).__module__.partition(".")[0] not in ("torch", "numpy", "builtins"):
        for key, value in getattr(tree, "__dict__", {}).items():
            yield from _buffers(value, f"{name}.{key}", depth - 1)


# ---- words -------------------------------------------------------------------------------------------------


def _moved(name: str, place: Place, now: Place | None) -> str:
    if now is None:
        return f"{name} is gone; it was recorded as {list(place.shape)}."
    if now._replace(address=place.address) == place:
        return f"{name} {list(place.shape)} is another tensor now: it was replaced after it was recorded."
    return f"{name} is {list(now.shape)} {now.dtype} now; it was recorded as {list(place.shape)} {place.dtype}."


def _where() -> str:
    """File and line of the innermost frame that is neither torch's nor this module's."""
    skipped = (str(Path(torch.__file__).parent), __file__)
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(skipped) and "functools" not in frame.filename:
            return f"{'/'.join(Path(frame.filename).parts[-3:])}:{frame.lineno}"
    return "an unknown place"

"""A communicator, whose ranks are threads over a simulated network. A call is an all-reduce of some ranks.

The trace has what each rank does, in its order: ``send``, ``receive``, ``wait`` and ``return``. It is the same in
every run: after a mistake, the ranks go on for as long as they can.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from minisgl.chapters.lab.grader.gate import Broken
from minisgl.chapters.lab.museum.calls import Note, load_plugins
from minisgl.chapters.lab.museum.pieces import NAME
from minisgl.plugin_manager.manager import PluginManager
from minisgl.testing.wire import RULES, Wire, WireViolation

load = load_plugins
SYMPTOM = "Some sums had numbers of a later step."


def start(manager: PluginManager, workload: Mapping[str, Any]) -> PluginManager:
    """Return the plugin: each call links the ranks anew."""
    return manager


class _Noted:
    """A transfer that notes its wait."""

    def __init__(self, transfer: Any, log: list[dict[str, Any]], entry: dict[str, Any]):
        self._transfer, self._log, self._entry = transfer, log, entry

    def wait(self, *limit: Any) -> bool:
        """Wait for the transfer."""
        __tracebackhide__ = True  # a deadlock names the student's line
        self._log.append({"does": "wait", "for": self._entry})
        done: bool = self._transfer.wait(*limit)
        return done

    def is_completed(self) -> bool:
        """Return whether the transfer has ended."""
        done: bool = self._transfer.is_completed()
        return done


class PatientWire(Wire):
    """A wire on which a rank's mistake stops no other rank that can go on. ``run`` raises the same error in every run.

    Whether a rank sees that a tensor changed may depend on the order in which the ranks run, so other errors precede.
    """

    def __init__(self, size: int):
        super().__init__(size)
        self._found: list[BaseException] = []

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, WireViolation) and error.rule == "deadlock":
            super()._fail(error)
        else:
            self._found.append(error)

    def _on_all_ended(self) -> None:
        super()._on_all_ended()
        found = sorted(self._found, key=str)
        changed = [each for each in found if isinstance(each, WireViolation) and each.rule == "changed"]
        self._errors = [*(each for each in found if each not in changed), *self._errors, *changed]


def call(manager: PluginManager, sizes: Any, note: Note) -> dict[str, int]:
    """Sum a tensor of ``[ranks, elements]`` over the ranks. Return the bytes and messages that the ranks send."""
    ranks, elements = sizes
    generator = torch.Generator().manual_seed(elements)
    given = torch.randint(-99, 100, (ranks, elements), generator=generator).float()
    logs: list[list[dict[str, Any]]] = [[] for _ in range(ranks)]

    def work(comm: Any) -> Tensor:
        send, receive, log = comm.send, comm.receive, logs[comm.rank]

        def noted(name: str, transfer: Any, x: Tensor, other: int) -> Any:
            entry = {"does": name, "other": other, "elements": x.numel()}
            log.append(entry)
            return _Noted(transfer(x, other), log, {"does": name, "other": other})

        comm.send = lambda x, to: noted("send", send, x, to)
        comm.receive = lambda x, source: noted("receive", receive, x, source)
        x = given[comm.rank].clone()
        total: Tensor = comm.all_reduce(x)
        log.append({"does": "return"})
        result = total.clone()
        x.fill_(torch.nan)  # the next layer writes into the same memory
        return result

    def make(rank: int, size: int) -> Any:
        config = manager.make("communicator", NAME)
        return manager.build("communicator", config, rank=rank, size=size, address="", device=torch.device("cpu"))

    wire = PatientWire(ranks)
    try:
        got = wire.run(make, work)
    except WireViolation as error:
        raise Broken(error.rule, RULES[error.rule], error.text) from error
    finally:
        for rank, log in enumerate(logs):
            for entry in log:
                note(ranks=ranks, rank=rank, **entry)
    for rank, total in enumerate(got):
        if not torch.equal(total, given.sum(0)):
            seen = f"On rank {rank} of {ranks}, the sum of {elements} elements is wrong."
            raise Broken("sum", "Each rank gets the sum over all ranks.", seen)
    sent = [each for messages in wire.sent for each in messages]
    return {"sent": sum(nbytes for _, nbytes in sent), "messages": len(sent)}


def draw(rng: random.Random, number: int) -> dict[str, Any]:
    """Return random sums: of few elements, of many, and of as many as are few enough for one exchange."""
    elements = rng.choice([1, rng.randint(1, 64), 64, 65, rng.randint(65, 300), 4096])
    return {"calls": [[rng.randint(1, 2 + number % 4), elements]]}

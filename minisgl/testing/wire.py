"""In-memory point-to-point messages between ranks that are threads of one process, with checks for deadlocks.

Each message is delivered as late as the rules allow. A send completes only when the other rank receives. The receiver's
buffer is filled only in ``wait``. So a deadlock is detected at once, and a rank that reads or overwrites a buffer too
early gets wrong data in every run. The object `Wire` replaces the process group of
`minisgl.plugins.communicator.group.GroupCommunicator`.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor

from minisgl.plugins.communicator.group import GroupCommunicator
from minisgl.testing.threads import RankStopped, RankThreads

__all__ = ["Wire", "WireViolation"]

T = TypeVar("T")

RULES = {
    "deadlock": "At any time, at least one rank can continue.",
    "sizes": "A receive expects the number of elements and the dtype that are sent.",
    "changed": "A tensor that is being sent does not change before the send was waited for.",
    "left": "Every message that is sent is received.",
    "unwaited": "Every send and every receive is waited for.",
    "strided": "A rank sends and receives contiguous tensors only.",
    "neighbour": "A rank sends to, and receives from, another existing rank.",
    "group": "Collectives are built from `send` and `receive`, and do not call the process group's own collectives.",
}
"""The name of each rule, and the rule as a sentence."""


class WireViolation(AssertionError):  # noqa: N818 - named like `SimViolation`
    """A rule was broken. ``rule`` is a key of `RULES`, ``rank`` the rank that broke it (None: several ranks)."""

    def __init__(self, rule: str, text: str, rank: int | None = None):
        self.rule, self.text, self.rank = rule, text, rank
        super().__init__(f"[{rule}] {text}\n  The rule: {RULES[rule]}")


class _Message:
    """A send or a receive of one rank. It is matched when the other rank has posted the opposite operation."""

    def __init__(self, wire: Wire, rank: int, other: int, x: Tensor, sends: bool):
        self.wire, self.rank, self.other, self.x, self.sends = wire, rank, other, x, sends
        self.before = x.clone() if sends else None  # content when the send was posted
        self.delivered: Tensor | None = None  # content that the receiver gets, once a rank has waited
        self.matched: _Message | None = None
        self.waited = False

    def wait(self, timeout: Any = None) -> bool:
        """Block until the operation is matched. A receive then fills its tensor."""
        self.wire._wait(self)
        return True

    def is_completed(self) -> bool:
        """Return whether the operation is matched. If it is, this call counts as a wait."""
        return self.matched is not None and self.wait()

    def __str__(self) -> str:
        action = f"for rank {self.other} to receive" if self.sends else f"for a message from rank {self.other}"
        return f"rank {self.rank} waits {action}"


class Wire(RankThreads):
    """``size`` ranks. ``sent[r]`` lists the messages that rank r sent, in order: (receiving rank, size in bytes)."""

    def __init__(self, size: int):
        super().__init__(size)
        self.sent: list[list[tuple[int, int]]] = [[] for _ in range(size)]
        self._posted: dict[tuple[int, int, bool], deque[_Message]] = {}  # (sender, receiver, sends), not matched yet
        self._messages: list[_Message] = []
        self._waiting: dict[int, tuple[_Message, str]] = {}  # rank -> (operation it waits for, line of code)

    def run(self, make: Callable[[int, int], Any], work: Callable[[Any], T]) -> list[T]:
        """Run ``work(make(rank, size))`` on each rank and return the results in rank order.

        ``make`` builds a rank's communicator. Raise the error of the rank that failed first, or `WireViolation`.
        """
        with mock.patch.object(GroupCommunicator, "_connect", self._connect):
            return self._run(lambda rank: work(make(rank, self.size)))

    @property
    def _connect(self) -> Any:
        def connect(communicator: GroupCommunicator, limit: Any, address: str) -> None:
            communicator._group = _ProcessGroup(self, communicator.rank)

        return connect

    # ---- send, receive, wait ----------------------------------------------------------------------------

    def _post(self, rank: int, other: int, x: Tensor, sends: bool) -> _Message:
        if not 0 <= other < self.size or other == rank:
            action = "sends to" if sends else "receives from"
            text = f"Rank {rank} {action} rank {other}. The ranks are 0 to {self.size - 1}."
            raise WireViolation("neighbour", text, rank)
        if not x.is_contiguous():
            text = f"Rank {rank} {'sends' if sends else 'receives'} a tensor with the strides {x.stride()}."
            raise WireViolation("strided", text, rank)
        message = _Message(self, rank, other, x, sends)
        pair = (rank, other) if sends else (other, rank)
        with self._changed:
            self._messages.append(message)
            if sends:
                self.sent[rank].append((other, x.nbytes))
            opposite = self._posted.setdefault((*pair, not sends), deque())
            if not opposite:
                self._posted.setdefault((*pair, sends), deque()).append(message)
                return message
            message.matched = opposite.popleft()
            message.matched.matched = message
            self._changed.notify_all()
        send, receive = (message, message.matched) if sends else (message.matched, message)
        if send.x.shape.numel() != receive.x.shape.numel() or send.x.dtype != receive.x.dtype:
            sizes = (f"{x.numel()} elements of {str(x.dtype).removeprefix('torch.')}" for x in (send.x, receive.x))
            text = f"Rank {send.rank} sends {next(sizes)}, but rank {receive.rank} expects {next(sizes)}."
            raise WireViolation("sizes", text, rank)
        return message

    def _wait(self, message: _Message) -> None:
        with self._changed:
            if message.matched is None:
                self._waiting[message.rank] = message, _line()
                self._check_deadlock()
            while message.matched is None:
                if self._errors:
                    raise RankStopped
                self._changed.wait(0.5)
            self._waiting.pop(message.rank, None)
            if message.waited:
                return
            message.waited = True
            send = message if message.sends else message.matched
            if message.sends or send.delivered is None:
                content = send.x.clone()
                send.delivered = content if send.delivered is None else send.delivered
                assert send.before is not None
                if not torch.equal(content, send.before):
                    text = f"Rank {send.rank} changed a tensor while it was being sent to rank {send.other}."
                    self._fail(WireViolation("changed", text, send.rank))
                    if self._errors:
                        raise RankStopped
            if not message.sends:
                message.x.copy_(send.delivered.view(message.x.shape))

    def _on_rank_end(self, rank: int) -> None:
        self._check_deadlock()

    def _check_deadlock(self) -> None:
        """Fail if every rank that still runs waits for an operation that is not matched."""
        waiting = {rank: found for rank, found in self._waiting.items() if found[0].matched is None}
        if self._running and not self._errors and self._running <= waiting.keys():
            waits = "; ".join(f"{message} ({line})" for _, (message, line) in sorted(waiting.items()))
            text = f"{waits[0].upper()}{waits[1:]}. No other rank is running."
            self._fail(WireViolation("deadlock", text))

    def _on_all_ended(self) -> None:
        if self._errors:
            return
        messages = sorted(self._messages, key=lambda message: message.rank)  # the same order in every run
        left = next((m for m in messages if m.sends and m.matched is None), None)
        if left is not None:
            text = f"Rank {left.rank} sent {left.x.numel()} elements to rank {left.other}, which did not receive them."
            self._errors.append(WireViolation("left", text, left.rank))
            return
        early = next((m for m in messages if not m.waited), None)
        if early is not None:
            what = f"sent to rank {early.other}" if early.sends else f"received from rank {early.other}"
            text = f"Rank {early.rank} {what} and did not wait for the operation to complete."
            self._errors.append(WireViolation("unwaited", text, early.rank))


class _ProcessGroup:
    """The object that a rank's communicator uses in place of a torch.distributed process group."""

    def __init__(self, wire: Wire, rank: int):
        self._wire, self._rank = wire, rank

    def send(self, tensors: list[Tensor], to: int, tag: int) -> _Message:
        return self._wire._post(self._rank, to, tensors[0], sends=True)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> _Message:
        return self._wire._post(self._rank, source, tensors[0], sends=False)

    def shutdown(self) -> None:
        """Do nothing: the group holds no resources."""

    abort = shutdown

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        text = f"Rank {self._rank} calls a collective of the process group; expected only send and receive."
        raise WireViolation("group", text, self._rank)

    allreduce = _allgather_base = broadcast = _refuse


def _line() -> str:
    """Return file and line of the innermost frame outside this file: the line that waits.

    A frame with a local variable ``__tracebackhide__`` is passed over, as by pytest: a test has wrapped the call.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and (frame.f_code.co_filename == __file__ or "__tracebackhide__" in frame.f_locals):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"

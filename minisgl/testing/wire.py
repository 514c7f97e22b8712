"""Ranks without a network: threads whose sends and receives meet in memory, or provably never will.

A message leaves as late, and arrives as late, as the rules allow: a send ends when the other side receives, and what is
received is there only after ``wait``. So who waits for ever is known at once, and who touches a message too early gets
the wrong one every time. It stands in for the process group of `minisgl.distributed.group.GroupCommunicator`.
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

from minisgl.distributed.group import GroupCommunicator
from minisgl.testing.threads import Gone, RankThreads

__all__ = ["Wire", "WireViolation"]

T = TypeVar("T")

RULES = {
    "deadlock": "Somebody can always go on.",
    "sizes": "Who receives expects just what is sent.",
    "changed": "A message does not change before its send was waited for.",
    "left": "What is sent is received.",
    "unwaited": "Every send and every receive is waited for.",
    "neighbour": "A message goes to another rank.",
    "group": "A collective is made of sends and receives.",
}


class WireViolation(AssertionError):  # noqa: N818 - as the simulated engine's violations are called
    """A rule was broken. ``rule`` is a key of `RULES`, ``rank`` whose doing it was (None: everybody's)."""

    def __init__(self, rule: str, text: str, rank: int | None = None):
        self.rule, self.text, self.rank = rule, text, rank
        super().__init__(f"[{rule}] {text}\n  The rule: {RULES[rule]}")


class _Message:
    """One end of a message: a send or a receive, until it has met the other."""

    def __init__(self, wire: Wire, rank: int, other: int, x: Tensor, sends: bool):
        self.wire, self.rank, self.other, self.x, self.sends = wire, rank, other, x, sends
        self.before = x.clone() if sends else None
        self.gone: Tensor | None = None  # what left, once it has
        self.met: _Message | None = None
        self.waited = False

    def wait(self, timeout: Any = None) -> bool:
        """Until it has met the other end."""
        self.wire._wait(self)
        return True

    def is_completed(self) -> bool:
        """Whether it has met the other end; if so, that counts as waiting."""
        return self.met is not None and self.wait()

    def __str__(self) -> str:
        verb = f"for rank {self.other} to receive" if self.sends else f"for what rank {self.other} sends"
        return f"rank {self.rank} waits {verb}"


class Wire(RankThreads):
    """``size`` ranks. ``sent[r]`` is what rank r sent, message by message: (to whom, bytes)."""

    def __init__(self, size: int):
        super().__init__(size)
        self.sent: list[list[tuple[int, int]]] = [[] for _ in range(size)]
        self._posted: dict[tuple[int, int, bool], deque[_Message]] = {}  # (from, to, sends), not met yet
        self._messages: list[_Message] = []
        self._waiting: dict[int, tuple[_Message, str]] = {}  # rank → what for, and on which line

    def run(self, make: Callable[[int, int], Any], work: Callable[[Any], T]) -> list[T]:
        """``work(make(rank, size))`` on each rank; the results in rank order. Raises what the first rank to fail
        raised, `WireViolation` among that."""
        with mock.patch.object(GroupCommunicator, "_connect", self._connect):
            return self._run(lambda rank: work(make(rank, self.size)))

    @property
    def _connect(self) -> Any:
        def connect(communicator: GroupCommunicator, limit: Any, address: str) -> None:
            communicator._group = _End(self, communicator.rank)

        return connect

    # ---- what an end does -------------------------------------------------------------------------------

    def _post(self, rank: int, other: int, x: Tensor, sends: bool) -> _Message:
        if not 0 <= other < self.size or other == rank:
            where = f"There are ranks 0 to {self.size - 1}."
            raise WireViolation("neighbour", f"Rank {rank} wants to talk to rank {other}. {where}", rank)
        message = _Message(self, rank, other, x, sends)
        pair = (rank, other) if sends else (other, rank)
        with self._changed:
            self._messages.append(message)
            if sends:
                self.sent[rank].append((other, x.nbytes))
            facing = self._posted.setdefault((*pair, not sends), deque())
            if not facing:
                self._posted.setdefault((*pair, sends), deque()).append(message)
                return message
            message.met = facing.popleft()
            message.met.met = message
            self._changed.notify_all()
        send, receive = (message, message.met) if sends else (message.met, message)
        if send.x.shape.numel() != receive.x.shape.numel() or send.x.dtype != receive.x.dtype:
            kinds = (f"{x.numel()} of {str(x.dtype).removeprefix('torch.')}" for x in (send.x, receive.x))
            text = f"Rank {send.rank} sends {next(kinds)}, rank {receive.rank} expects {next(kinds)}."
            raise WireViolation("sizes", text, rank)
        return message

    def _wait(self, message: _Message) -> None:
        with self._changed:
            if message.met is None:
                self._waiting[message.rank] = message, _line()
                self._check()
            while message.met is None:
                if self._errors:
                    raise Gone
                self._changed.wait(0.5)
            self._waiting.pop(message.rank, None)
            if message.waited:
                return
            message.waited = True
            send = message if message.sends else message.met
            if send.gone is None:
                send.gone = send.x.clone()
                assert send.before is not None
                if not torch.equal(send.gone, send.before):
                    self._fail(WireViolation("changed", f"Rank {send.rank}'s message changed on its way.", send.rank))
                    raise Gone
            if not message.sends:
                message.x.copy_(send.gone.view(message.x.shape))

    def _left(self, rank: int) -> None:
        self._check()

    def _check(self) -> None:
        """Whether everybody who is still there waits for something that has not met anybody."""
        waiting = {rank: found for rank, found in self._waiting.items() if found[0].met is None}
        if self._running and not self._errors and self._running <= waiting.keys():
            stand = "; ".join(f"{message} ({line})" for _, (message, line) in sorted(waiting.items()))
            self._fail(WireViolation("deadlock", f"{stand[0].upper()}{stand[1:]}. Nobody else is there."))

    def _ended(self) -> None:
        if self._errors:
            return
        left = next((m for m in self._messages if m.sends and m.met is None), None)
        if left is not None:
            text = f"Rank {left.rank} sent {left.x.numel()} elements to rank {left.other}, which never received."
            self._errors.append(WireViolation("left", text, left.rank))
            return
        early = next((m for m in self._messages if not m.waited), None)
        if early is not None:
            what = f"sent to rank {early.other}" if early.sends else f"received from rank {early.other}"
            self._errors.append(WireViolation("unwaited", f"Rank {early.rank} {what} and did not wait.", early.rank))


class _End:
    """What a rank's communicator holds in place of a process group."""

    def __init__(self, wire: Wire, rank: int):
        self._wire, self._rank = wire, rank

    def send(self, tensors: list[Tensor], to: int, tag: int) -> _Message:
        return self._wire._post(self._rank, to, tensors[0], sends=True)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> _Message:
        return self._wire._post(self._rank, source, tensors[0], sends=False)

    def shutdown(self) -> None:
        """Nothing to end."""

    abort = shutdown

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise WireViolation("group", f"Rank {self._rank} asks the process group for a whole collective.", self._rank)

    allreduce = _allgather_base = broadcast = _refuse


def _line() -> str:
    """The line that waits: the innermost one outside this file."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"

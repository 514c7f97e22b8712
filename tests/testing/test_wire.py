"""Tests of `Wire`, in-memory point-to-point messages: correct programs run, and each rule is broken by a test."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch

from minisgl.plugins.communicator.group import GroupCommunicator
from minisgl.testing.wire import RULES, Wire, WireViolation

CPU = torch.device("cpu")


def link(rank: int, size: int) -> GroupCommunicator:
    return GroupCommunicator(60.0, rank, size, "", CPU)


def pass_on(comm: GroupCommunicator) -> float:
    """Send the rank's number to the next rank, and return the number that the previous rank sent."""
    outgoing, incoming = torch.full((3,), float(comm.rank)), torch.empty(3)
    sending = comm.send(outgoing, (comm.rank + 1) % comm.size)
    comm.receive(incoming, (comm.rank - 1) % comm.size).wait()
    sending.wait()
    return float(incoming[2])


def test_send_and_receive() -> None:
    """Messages are delivered, and `Wire.sent` records receiver and size of each."""
    wire = Wire(4)
    assert wire.run(link, pass_on) == [3.0, 0.0, 1.0, 2.0]
    assert wire.sent == [[((rank + 1) % 4, 12)] for rank in range(4)]


def test_order_of_messages() -> None:
    """Messages between two ranks are delivered in the order in which they were sent."""

    def work(comm: GroupCommunicator) -> list[int]:
        boxes = [torch.zeros(1, dtype=torch.int64) for _ in range(3)]
        if comm.rank == 0:
            operations = [comm.send(torch.tensor([i]), 1) for i in range(3)]
        else:
            operations = [comm.receive(box, 0) for box in boxes]
        for operation in operations:
            operation.wait(timedelta(seconds=1))
        return [int(box) for box in boxes]

    assert Wire(2).run(link, work) == [[0, 0, 0], [0, 1, 2]]


def test_delivery_in_wait() -> None:
    """The buffer of a receive is filled only in ``wait``."""

    def work(comm: GroupCommunicator) -> tuple[float, float]:
        incoming = torch.zeros(1)
        if comm.rank == 0:
            comm.send(torch.ones(1), 1).wait()
            return 0.0, 0.0
        receiving = comm.receive(incoming, 0)
        before = float(incoming)
        receiving.wait()
        return before, float(incoming)

    assert Wire(2).run(link, work)[1] == (0.0, 1.0)


def test_error_of_a_rank() -> None:
    """The error of a rank ends the ranks that wait for it, and is raised."""

    def work(comm: GroupCommunicator) -> None:
        if comm.rank == 1:
            raise KeyError("mine")
        comm.receive(torch.empty(1), 1).wait()

    with pytest.raises(KeyError, match="mine"):
        Wire(3).run(link, work)


def all_send_first(comm: GroupCommunicator) -> None:
    comm.send(torch.ones(1), (comm.rank + 1) % comm.size).wait()
    comm.receive(torch.ones(1), (comm.rank - 1) % comm.size).wait()


def rank_0_never_sends(comm: GroupCommunicator) -> None:
    if comm.rank:
        comm.receive(torch.ones(1), 0).wait()


def another_size(comm: GroupCommunicator) -> None:
    if comm.rank == 0:
        comm.send(torch.ones(2), 1).wait()
    elif comm.rank == 1:
        comm.receive(torch.ones(3), 0).wait()


def another_type(comm: GroupCommunicator) -> None:
    if comm.rank == 0:
        comm.send(torch.ones(2), 1).wait()
    elif comm.rank == 1:
        comm.receive(torch.ones(2, dtype=torch.int32), 0).wait()


def change_sent_tensor(comm: GroupCommunicator) -> None:
    x = torch.ones(2)
    if comm.rank == 0:
        sending = comm.send(x, 1)
        x += 1
        sending.wait()
    elif comm.rank == 1:
        comm.receive(x, 0).wait()


def change_received_tensor(comm: GroupCommunicator) -> None:
    """Change a tensor that was received already, before the sender has waited."""
    x = torch.ones(2)
    if comm.rank == 0:
        sending = comm.send(x, 1)
        comm.receive(torch.empty(1), 1).wait()  # rank 1 sends it when it has received x
        x += 1
        sending.wait()
    elif comm.rank == 1:
        comm.receive(x, 0).wait()
        comm.send(torch.ones(1), 0).wait()


def no_rank_receives(comm: GroupCommunicator) -> None:
    if comm.rank == 0:
        comm.send(torch.ones(2), 1)


def receive_without_wait(comm: GroupCommunicator) -> None:
    if comm.rank == 0:
        comm.send(torch.ones(2), 1).wait()
    elif comm.rank == 1:
        comm.receive(torch.ones(2), 0)


def send_every_second_element(comm: GroupCommunicator) -> None:
    comm.send(torch.arange(6.0)[::2], (comm.rank + 1) % comm.size).wait()


def send_to_itself(comm: GroupCommunicator) -> None:
    comm.send(torch.ones(2), comm.rank)


def call_group_collective(comm: GroupCommunicator) -> None:
    comm.all_reduce(torch.ones(2))


BROKEN: dict[str, list[Callable[[GroupCommunicator], None]]] = {
    "deadlock": [all_send_first, rank_0_never_sends],
    "sizes": [another_size, another_type],
    "changed": [change_sent_tensor, change_received_tensor],
    "left": [no_rank_receives],
    "unwaited": [receive_without_wait],
    "strided": [send_every_second_element],
    "neighbour": [send_to_itself],
    "group": [call_group_collective],
}


@pytest.mark.parametrize(("rule", "work"), [(rule, work) for rule, works in BROKEN.items() for work in works])
def test_broken_rules(rule: str, work: Callable[[GroupCommunicator], None]) -> None:
    """A program that breaks a rule gets a `WireViolation` with this rule."""
    with pytest.raises(WireViolation) as caught:
        Wire(3).run(link, work)
    assert caught.value.rule == rule


def test_all_rules_are_tested() -> None:
    """Each rule of `RULES` has a program that breaks it."""
    assert BROKEN.keys() == RULES.keys()


def test_deadlock_message() -> None:
    """The message of a deadlock names for each rank the rank that it waits for, and the line of code."""
    with pytest.raises(WireViolation, match=r"Rank 0 waits for rank 1 to receive \(test_wire\.py:\d+\); rank 1 waits"):
        Wire(2).run(link, all_send_first)

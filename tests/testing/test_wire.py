"""The wire without a network: right programs run on it, and each rule is broken once."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch

from minisgl.distributed.group import GroupCommunicator
from minisgl.testing.wire import RULES, Wire, WireViolation

CPU = torch.device("cpu")


def link(rank: int, size: int) -> GroupCommunicator:
    return GroupCommunicator(60.0, rank, size, "", CPU)


def pass_on(comm: GroupCommunicator) -> float:
    """Each rank's number to its right."""
    outgoing, incoming = torch.full((3,), float(comm.rank)), torch.empty(3)
    sending = comm.send(outgoing, (comm.rank + 1) % comm.size)
    comm.receive(incoming, (comm.rank - 1) % comm.size).wait()
    sending.wait()
    return float(incoming[2])


def test_messages_meet_and_are_counted() -> None:
    wire = Wire(4)
    assert wire.run(link, pass_on) == [3.0, 0.0, 1.0, 2.0]
    assert wire.sent == [[((rank + 1) % 4, 12)] for rank in range(4)]


def test_messages_between_two_ranks_keep_their_order() -> None:
    def work(comm: GroupCommunicator) -> list[int]:
        boxes = [torch.zeros(1, dtype=torch.int64) for _ in range(3)]
        if comm.rank == 0:
            open_ends = [comm.send(torch.tensor([i]), 1) for i in range(3)]
        else:
            open_ends = [comm.receive(box, 0) for box in boxes]
        for end in open_ends:
            end.wait(timedelta(seconds=1))
        return [int(box) for box in boxes]

    assert Wire(2).run(link, work) == [[0, 0, 0], [0, 1, 2]]


def test_what_comes_is_there_only_after_waiting() -> None:
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


def test_an_error_of_one_rank_ends_the_others() -> None:
    def work(comm: GroupCommunicator) -> None:
        if comm.rank == 1:
            raise KeyError("mine")
        comm.receive(torch.empty(1), 1).wait()

    with pytest.raises(KeyError, match="mine"):
        Wire(3).run(link, work)


def all_send_first(comm: GroupCommunicator) -> None:
    comm.send(torch.ones(1), (comm.rank + 1) % comm.size).wait()
    comm.receive(torch.ones(1), (comm.rank - 1) % comm.size).wait()


def one_never_sends(comm: GroupCommunicator) -> None:
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


def writes_into_what_leaves(comm: GroupCommunicator) -> None:
    x = torch.ones(2)
    if comm.rank == 0:
        sending = comm.send(x, 1)
        x += 1
        sending.wait()
    elif comm.rank == 1:
        comm.receive(x, 0).wait()


def nobody_receives(comm: GroupCommunicator) -> None:
    if comm.rank == 0:
        comm.send(torch.ones(2), 1)


def does_not_wait(comm: GroupCommunicator) -> None:
    if comm.rank == 0:
        comm.send(torch.ones(2), 1).wait()
    elif comm.rank == 1:
        comm.receive(torch.ones(2), 0)


def talks_to_itself(comm: GroupCommunicator) -> None:
    comm.send(torch.ones(2), comm.rank)


def asks_the_group(comm: GroupCommunicator) -> None:
    comm.all_reduce(torch.ones(2))


BROKEN: dict[str, list[Callable[[GroupCommunicator], None]]] = {
    "deadlock": [all_send_first, one_never_sends],
    "sizes": [another_size, another_type],
    "changed": [writes_into_what_leaves],
    "left": [nobody_receives],
    "unwaited": [does_not_wait],
    "neighbour": [talks_to_itself],
    "group": [asks_the_group],
}


@pytest.mark.parametrize(("rule", "work"), [(rule, work) for rule, works in BROKEN.items() for work in works])
def test_each_rule_is_seen_to_be_broken(rule: str, work: Callable[[GroupCommunicator], None]) -> None:
    with pytest.raises(WireViolation) as caught:
        Wire(3).run(link, work)
    assert caught.value.rule == rule


def test_every_rule_is_broken_by_a_test() -> None:
    assert BROKEN.keys() == RULES.keys()


def test_a_deadlock_names_who_waits_for_whom_and_where() -> None:
    with pytest.raises(WireViolation, match=r"Rank 0 waits for rank 1 to receive \(test_wire\.py:\d+\); rank 1 waits"):
        Wire(2).run(link, all_send_first)

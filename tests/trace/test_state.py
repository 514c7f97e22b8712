"""Following a trace: the pages, requests and tree that come of it are the scheduler's own, after every event."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from minisgl.plugins.cache.radix import RadixCache
from minisgl.scheduler.page_allocator import CACHE, FREE, RETIRING
from minisgl.testing.drive import Drive, Job
from minisgl.testing.small import tight
from minisgl.testing.traced import traced
from minisgl.testing.workloads import Setup, jobs, setups
from minisgl.trace import events as ev
from minisgl.trace.check import check
from minisgl.trace.read import read
from minisgl.trace.state import State
from minisgl.trace.tree import PageTree


def picture(drive: Drive) -> Any:
    """What the scheduler's own books say: owners, users, and the cache's nodes by their pages."""
    ledger = drive.scheduler.cache_manager.allocator
    nodes = set()
    if isinstance(drive.cache, RadixCache):
        nodes = {(tuple(n.pages.tolist()), n.users, n.stamp) for n in drive.cache.nodes()}
    return ledger.pages.owner.tolist(), ledger.ref_counts.tolist(), nodes


def followed(state: State) -> Any:
    nodes = {(tuple(node.pages), node.users, node.stamp) for node in state.tree.nodes()}
    return state.owner.tolist(), state.users.tolist(), nodes


def run(path: Path, setup: Setup, clients: list[Job]) -> list[Any]:
    """The pictures after each step that changed the pool, from the inside."""
    spec, cache, policy, options = setup.build()
    pictures: list[Any] = []
    with tight(), traced(path, spec, cache, policy, thorough=False, **options) as drive:
        real = drive.step

        def step() -> Any:
            out = real()
            pictures.append(picture(drive))
            return out

        drive.step = step  # type: ignore[method-assign]
        drive.run(clients)
    return pictures


@settings(max_examples=60, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(st.data())
def test_the_followed_state_is_the_schedulers_and_breaks_no_promise(tmp_path_factory: Any, data: st.DataObject) -> None:
    setup = data.draw(setups())
    path = tmp_path_factory.mktemp("trace") / "run.jsonl"
    inside = run(path, setup, data.draw(jobs(setup)))
    trace = read(path)
    assert trace.whole
    state, outside = State(trace.spec), []
    for event in trace:
        state.apply(event)
        if isinstance(event, ev.Pool):
            outside.append(followed(state))
            counts = state.count(FREE), state.count(CACHE), state.evictable, state.count(RETIRING)
            assert counts == (event.free, event.cached, event.evictable, event.retiring)
    assert state.idle
    assert (state.owner < FREE).sum() == state.count(CACHE)
    # A picture that differs from the one before has an event between them, so each is found, in order.
    at = 0
    for seen in outside:
        at = next(i for i in range(at, len(inside)) if inside[i] == seen)
    if inside:
        assert followed(state) == inside[-1]
    assert check(trace) is None


def test_a_tree_splits_where_a_lock_ends_and_keeps_users_and_age() -> None:
    tree = PageTree()
    tree.insert(None, [1, 2, 3], 0)
    tree.lock(3, 0)
    tree.lock(2, 5)  # another request matched two of the three pages
    assert [(n.pages, n.users, n.step, n.depth) for n in tree.nodes()] == [([1, 2], 2, 5, 0), ([3], 1, 0, 2)]
    tree.insert(2, [7], 6)
    assert (tree.path(7), tree.path(3), tree.path(None), tree.splits) == ([1, 2, 7], [1, 2, 3], [], 1)
    tree.insert(1, [8], 7)  # parts inside a node
    assert tree.splits == 2
    tree.evict([7, 8])
    assert {page for node in tree.nodes() for page in node.pages} == {1, 2, 3} == set(tree.where)

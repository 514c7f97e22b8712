"""`State` and `PageTree` reconstruct the scheduler's pages, locks and radix tree from the events of a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from minisgl.plugins.cache.prefix import SharedPageAllocator
from minisgl.plugins.cache.radix import RadixCache
from minisgl.scheduler.page_allocator import CACHE, FREE, RETIRING
from minisgl.testing.drive import Drive, Job
from minisgl.testing.small import no_lookahead
from minisgl.testing.traced import traced
from minisgl.testing.workloads import Setup, jobs, setups
from minisgl.trace import events as ev
from minisgl.trace.check import check
from minisgl.trace.read import read
from minisgl.trace.state import State
from minisgl.trace.tree import PageTree


def snapshot(drive: Drive) -> Any:
    """Return the scheduler's own state: owners of pages, locks of pages, and the nodes of the cache."""
    allocator = drive.scheduler.cache_manager.allocator
    nodes = set()
    if isinstance(drive.cache, RadixCache):
        nodes = {(tuple(n.pages.tolist()), n.users, n.stamp) for n in drive.cache.nodes()}
    shared = isinstance(allocator, SharedPageAllocator)  # without a cache, no page has users
    return allocator.owner.tolist(), allocator.ref_counts.tolist() if shared else [0] * allocator.size, nodes


def reconstructed(state: State) -> Any:
    """Return the state from the trace, in the form of `snapshot`."""
    nodes = {(tuple(node.pages), node.users, node.stamp) for node in state.tree.nodes()}
    return state.owner.tolist(), state.ref_counts.tolist(), nodes


def run(path: Path, setup: Setup, clients: list[Job]) -> list[Any]:
    """Run a workload with a trace. Return the scheduler's snapshots after each step."""
    spec, cache, policy, options = setup.build()
    snapshots: list[Any] = []
    with no_lookahead(), traced(path, spec, cache, policy, thorough=False, **options) as drive:
        real = drive.step

        def step() -> Any:
            out = real()
            snapshots.append(snapshot(drive))
            return out

        drive.step = step  # type: ignore[method-assign]
        drive.run(clients)
    return snapshots


@settings(max_examples=60, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(st.data())
def test_state_equals_the_schedulers(tmp_path_factory: Any, data: st.DataObject) -> None:
    """After each event, the reconstructed state equals the scheduler's; and the checker accepts the trace."""
    setup = data.draw(setups())
    path = tmp_path_factory.mktemp("trace") / "run.jsonl"
    snapshots = run(path, setup, data.draw(jobs(setup)))
    trace = read(path)
    assert trace.complete
    state, states = State(trace.spec), []
    for event in trace:
        state.apply(event)
        if isinstance(event, ev.Pool):
            states.append(reconstructed(state))
            counts = state.count(FREE), state.count(CACHE), state.num_evictable_pages, state.count(RETIRING)
            assert counts == (event.free, event.cached, event.evictable, event.retiring)
    assert state.idle
    assert (state.owner < FREE).sum() == state.count(CACHE)
    # Every reconstructed state is one of the snapshots, in the same order. Some snapshots have no Pool event.
    at = 0
    for expected in states:
        at = next(i for i in range(at, len(snapshots)) if snapshots[i] == expected)
    if snapshots:
        assert reconstructed(state) == snapshots[-1]
    assert check(trace) is None


def test_tree_splits_at_the_end_of_a_lock() -> None:
    """Both parts of a split node keep the users and the age of the node."""
    tree = PageTree()
    tree.insert(None, [1, 2, 3], 0)
    tree.lock(3, 0)
    tree.lock(2, 5)  # another request matched two of the three pages
    assert [(n.pages, n.users, n.step, n.depth) for n in tree.nodes()] == [([1, 2], 2, 5, 0), ([3], 1, 0, 2)]
    tree.insert(2, [7], 6)
    assert (tree.path(7), tree.path(3), tree.path(None), tree.splits) == ([1, 2, 7], [1, 2, 3], [], 1)
    tree.insert(1, [8], 7)  # the prefix ends inside a node
    assert tree.splits == 2
    tree.evict([7, 8])
    assert {page for node in tree.nodes() for page in node.pages} == {1, 2, 3} == set(tree.node_of)

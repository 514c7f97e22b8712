"""Settings for all tests: torch uses one thread, because the tests' tensors are small and tests run in parallel.

Hypothesis gets no deadline, and httpx waits 60 s by default instead of 5, because a busy machine takes long. When
several processes run the tests, a module's tests run in one of them, so that its fixtures are made once, and the
modules that take longest begin first, so that no process waits for another at the end.

Of a test that is marked ``thorough``, only a selection of the cases runs, unless MINISGL_THOROUGH is set (``make
test-all``): each set of each ``parametrize`` is in at least one case, but not each combination; with ``every=n``, only
the first of each n cases; a ``pytest.param`` that is marked itself is left out. The end of the run says how many cases
were left out.

The garbage collector does not search the objects of modules and collected tests again and again, here and in the
processes that tests start (children/sitecustomize.py).
"""

from __future__ import annotations

import gc
import inspect
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import hypothesis
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start
hypothesis.settings.register_profile("minisgl", deadline=None)
hypothesis.settings.load_profile("minisgl")
default_timeout: httpx.Timeout = inspect.signature(httpx.get).parameters["timeout"].default
default_timeout.connect = default_timeout.read = default_timeout.write = default_timeout.pool = 60.0

gc.disable()  # until all tests are collected
CHILDREN = str(Path(__file__).parent / "children")
if CHILDREN not in (paths := os.environ.get("PYTHONPATH", "").split(os.pathsep)):
    os.environ["PYTHONPATH"] = os.pathsep.join([CHILDREN, *filter(None, paths)])

TESTS = f"{Path(__file__).parent.as_posix()}/"
LONGEST = (
    "docs/test_rendered.py",
    "server/test_processes.py",
    "exact/test_exact.py",
    "docs/test_site.py",
    "kernel/test_triton_interpreted.py",
    "test_without_plugins.py",
    "docs/test_how_to.py",
    "chapters/lab/test_solutions.py",
    "chapters/lab/test_grading.py",
    "server/test_failing_plugins.py",
    "docs/test_blocks.py",
    "engine/test_draft_acceptance.py",
    "server/test_greedy_over_http.py",
    "models/test_fp8.py",
    "server/test_errors.py",
    "chapters/ladder/test_stages.py",
    "models/test_missing_fields.py",
    "server/test_tools.py",
    "chapters/lab/test_grader.py",
    "plugins/attention/test_triton_attention_interpreted.py",
    "engine/test_proposers_on_models.py",
    "testing/test_proposer_kit.py",
    "bench/test_online.py",
    "server/test_connections.py",
    "chapters/lab/test_example_package.py",
    "chapters/lab/test_stretch.py",
    "options/test_compose.py",
)
"""The modules whose tests take longest, the longest first. A module that is missing here only begins later."""


THOROUGH = bool(os.environ.get("MINISGL_THOROUGH"))
LEFT_OUT = pytest.StashKey[int]()


def selected(cases: list[pytest.Function], every: int | None) -> list[pytest.Function]:
    """Return the cases of one test that run without MINISGL_THOROUGH: always the same.

    Choose cases with many new parameter sets before those with few, until each parameter set is in one.
    """
    if every is not None:
        return cases[::every]
    chosen, seen = set(), set[tuple[int, str]]()
    sets = [set(enumerate(case.callspec._idlist)) if hasattr(case, "callspec") else {(0, "")} for case in cases]
    for new in range(max(map(len, sets)), 0, -1):
        for i, own in enumerate(sets):
            if len(own - seen) >= new:
                chosen.add(i)
                seen |= own
    return [cases[i] for i in sorted(chosen)]


PYPROJECT = Path(TESTS).parent / "pyproject.toml"


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """Leave out a module that imports a folder of plugins that was deleted: it has tests of these plugins.

    Whatever is faster or optional may be deleted, and the tests of the rest run. A misspelt name still is an error.
    """
    report: Any = yield
    missing = re.search(r"No module named 'minisgl\.plugins\.(\w+)", str(report.longrepr)) if report.failed else None
    deleted = missing and not (PYPROJECT.with_name("plugins") / missing[1]).is_dir()
    if missing and deleted and f'"minisgl.plugins.{missing[1]}"' in PYPROJECT.read_text("utf-8"):
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 0, f"Skipped: the folder plugins/{missing[1]} was deleted")
    return report


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Remove the cases that only run with MINISGL_THOROUGH from ``items``."""
    tests: dict[str, list[pytest.Function]] = {}
    out: set[pytest.Item] = set()
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("thorough"):
            if hasattr(item, "callspec") and any(mark.name == "thorough" for mark in item.callspec.marks):
                out.add(item)
            else:
                tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        mark = cases[0].get_closest_marker("thorough")
        assert mark is not None
        out |= set(cases) - set(selected(cases, **({"every": None} | mark.kwargs)))
    config.stash[LEFT_OUT] = len(out)
    config.hook.pytest_deselected(items=list(out))
    items[:] = [item for item in items if item not in out]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In a process of pytest-xdist: tell the main process how many cases were left out."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """In the main process of pytest-xdist: note how many cases a process left out; all leave out the same."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", 0)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say how many cases were left out."""
    if out := config.stash.get(LEFT_OUT, 0):
        terminalreporter.write_line(f"{out} cases of tests marked thorough were left out; `make test-all` runs them.")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the tests of a module into one group, unless they have another, and the longest modules first."""
    if not THOROUGH:
        leave_out(config, items)
    order = {name: i for i, name in enumerate(LONGEST)}
    modules = {item: item.path.as_posix().removeprefix(TESTS) for item in items}
    for item, module in modules.items():
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(module))
    items.sort(key=lambda item: order.get(modules[item], len(order)))


def pytest_sessionstart(session: pytest.Session) -> None:
    """In the main process of pytest-xdist, which collects no tests: let the garbage collector run."""
    if session.config.pluginmanager.hasplugin("dsession"):
        gc.enable()


def pytest_collection_finish() -> None:
    """Let the garbage collector run, and exclude all objects that exist now from its searches."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Set torch to one thread during a test module. Do nothing if torch is not imported."""
    torch = sys.modules.get("torch")
    if torch is None or type(torch) is not ModuleType:  # `minisgl.plugins.external.lazy` imports torch when it is used
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

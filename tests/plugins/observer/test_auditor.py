"""The auditor: silent over healthy runs of every kind, and each planted bug is found by its rule, on the right page."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from minisgl import LLM, SamplingParams
from minisgl.course.lab.gates.ledger import BUGS, STRUCK, Struck
from minisgl.course.lab.grader.observed import run, watch
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.observer.auditor import RULES, Auditor
from minisgl.testing.drive import Drive, Job
from minisgl.testing.planted import Hasty
from minisgl.testing.small import job, make, pool, tight
from minisgl.testing.workloads import jobs, setups

NAME = "minisgl.plugins.observer.auditor"


def auditor_of(manager: PluginManager) -> Auditor:
    (auditor,) = [p for p in manager._manager.get_plugins() if type(p) is Auditor]
    return auditor


def audited(clients: Sequence[Job], **options: Any) -> tuple[Auditor, Drive]:
    manager = PluginManager.load([NAME], light=True)
    drive = make(hook=manager.hook, thorough=False, **options)
    drive.run(clients)
    return auditor_of(manager), drive


def quiet(auditor: Auditor, held: int) -> None:
    """Nothing found, and its books end as the scheduler's do."""
    assert auditor.findings == []
    assert auditor.open == set()
    assert len(auditor.owner) == held


# ---- no false alarms -------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_workload_on_the_healthy_scheduler_is_without_findings(data: st.DataObject) -> None:
    setup = data.draw(setups())
    clients = data.draw(jobs(setup))
    spec, cache, policy, options = setup.build()
    manager = PluginManager.load([NAME], light=True)
    drive = Drive(spec, cache, policy, hook=manager.hook, thorough=False, **options)
    drive.run(clients)
    quiet(auditor_of(manager), cache.total_pages)


def test_pages_that_many_read_are_no_leak() -> None:
    auditor, drive = audited([job(uid, 13, first=0, arrive=uid) for uid in range(1, 6)])
    assert drive.report.cached_tokens > 0
    quiet(auditor, drive.cache.total_pages)


def test_requests_that_make_way_are_no_leak_and_stay_open() -> None:
    with tight():
        auditor, drive = audited([job(1, answer=20), job(2, answer=20)], spec=pool(9), cache="naive")
    assert drive.report.retractions > 0
    quiet(auditor, 0)


@pytest.mark.parametrize("overlap", [False, True])
def test_clients_that_leave_in_any_state_are_no_finding(overlap: bool) -> None:
    """Before they have a slot, in the middle of a prompt, while a step runs, and twice."""
    with tight():
        for when in range(12):
            leaving = [job(1, 20), job(2, 20, abort=when), job(3, 11, answer=20, abort=when), job(4, 9)]
            auditor, drive = audited(leaving, spec=pool(14, slots=3), overlap=overlap, max_prefill_tokens=8)
            quiet(auditor, drive.cache.total_pages)


def test_an_engine_that_dies_leaves_no_findings() -> None:
    manager = PluginManager.load([NAME], light=True)
    drive = make(hook=manager.hook)
    for uid in (1, 2, 3, 4, 5):
        drive.add(job(uid))
    drive.step()
    drive.fail("the device is gone")
    assert auditor_of(manager).findings == []
    assert auditor_of(manager).open == set()


def test_it_works_in_the_engine_and_its_metrics_can_be_read() -> None:
    with LLM("tutor", overrides=["device=cpu", "num_pages=40", f"plugins={NAME}"]) as llm:
        prompts = ["Count from 5 to 9.", "Count from 5 to 30.", "What is 12 + 30?"]
        llm.generate(prompts, SamplingParams(max_tokens=40))
        auditor = auditor_of(llm.plugin_manager)
        assert auditor.findings == []
        assert auditor.read > 0
        families = text_string_to_metric_families(auditor.minisgl_metrics())
        samples = {(s.name, *s.labels.values()): s.value for f in families for s in f.samples}
    assert {key[1] for key in samples if key[0] == "minisgl_audit_findings_total"} == set(RULES)
    assert sum(value for key, value in samples.items() if key[0] == "minisgl_audit_findings_total") == 0
    assert samples["minisgl_audit_open_requests",] == 0
    assert samples["minisgl_audit_pages", "requests"] == 0
    assert samples["minisgl_audit_pages", "cache"] == len(auditor.owner) > 0


# ---- what is planted is found ------------------------------------------------------------------------------

FOUND_AS = {"leak": "leak", "twice": "owner", "in-flight": "in-flight", "table": "table", "reply": "reply"}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found_by_its_rule_where_it_strikes(bug: str) -> None:
    workload, struck, manager = STRUCK[bug](), Struck(), PluginManager()
    manager.add(NAME)  # alone: the built-in observers trust the scheduler
    drive = watch({**workload, "policy": "mixed"}, manager)
    drive.scheduler.planner.policy = Hasty()
    with tight(), BUGS[bug](struck), contextlib.suppress(AssertionError):
        run(drive, workload)
    auditor = auditor_of(manager)
    first = auditor.findings[0]
    assert first.rule == FOUND_AS[bug]
    assert (first.uid, first.page) in struck.places

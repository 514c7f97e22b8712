"""The auditor has no findings in correct runs, and finds each planted bug, with the right rule and page."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from minisgl import LLM, SamplingParams
from minisgl.chapters.lab.gates.ledger import BUGS, TRIGGERS, Damage
from minisgl.chapters.lab.grader.observer_runs import run, watch
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.observer.auditor import RULES, Auditor
from minisgl.testing.drive import Drive, Job
from minisgl.testing.planted import ArrivalOrderPolicy
from minisgl.testing.small import job, make, no_lookahead, pool
from minisgl.testing.workloads import jobs, setups

NAME = "minisgl.plugins.observer.auditor"


def auditor_of(manager: PluginManager) -> Auditor:
    (auditor,) = [p for p in manager._manager.get_plugins() if type(p) is Auditor]
    return auditor


def audited(clients: Sequence[Job], **options: Any) -> tuple[Auditor, Drive]:
    manager = PluginManager.load([NAME], light=True)
    drive = make(observers=manager.hook, thorough=False, **options)
    drive.run(clients)
    return auditor_of(manager), drive


def assert_no_findings(auditor: Auditor, total_cached: int) -> None:
    """Assert that the auditor found nothing, and that the cache owns all pages that have an owner."""
    assert auditor.findings == []
    assert auditor.open == set()
    assert len(auditor.owner) == total_cached


# ---- no false alarms -------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_workload_has_no_findings(data: st.DataObject) -> None:
    setup = data.draw(setups())
    clients = data.draw(jobs(setup))
    spec, cache, policy, options = setup.build()
    manager = PluginManager.load([NAME], light=True)
    drive = Drive(spec, cache, policy, observers=manager.hook, thorough=False, **options)
    drive.run(clients)
    assert_no_findings(auditor_of(manager), drive.num_cached_pages)


def test_shared_pages_are_no_leak() -> None:
    auditor, drive = audited([job(uid, 13, first=0, arrive=uid) for uid in range(1, 6)])
    assert drive.report.cached_tokens > 0
    assert_no_findings(auditor, drive.num_cached_pages)


def test_retracted_requests_are_no_leak() -> None:
    with no_lookahead():
        auditor, drive = audited([job(1, answer=20), job(2, answer=20)], spec=pool(9), cache="naive")
    assert drive.report.retractions > 0
    assert_no_findings(auditor, 0)


@pytest.mark.parametrize("overlap", [False, True])
def test_aborts_are_no_finding(overlap: bool) -> None:
    """Aborts of waiting requests, in the middle of a prompt and while a step is in flight have no findings."""
    with no_lookahead():
        for when in range(12):
            clients = [job(1, 20), job(2, 20, abort=when), job(3, 11, answer=20, abort=when), job(4, 9)]
            auditor, drive = audited(
                clients, spec=pool(14, max_running_requests=3), overlap=overlap, max_prefill_tokens=8
            )
            assert_no_findings(auditor, drive.num_cached_pages)


def test_engine_failure_has_no_findings() -> None:
    manager = PluginManager.load([NAME], light=True)
    drive = make(observers=manager.hook)
    for uid in (1, 2, 3, 4, 5):
        drive.add(job(uid))
    drive.step()
    drive.fail("the device is gone")
    assert auditor_of(manager).findings == []
    assert auditor_of(manager).open == set()


def test_metrics_with_a_model() -> None:
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


# ---- planted bugs ------------------------------------------------------------------------------------------

FOUND_AS = {"leak": "leak", "twice": "owner", "in-flight": "in-flight", "table": "table", "reply": "reply"}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_is_found(bug: str) -> None:
    workload, damage, manager = TRIGGERS[bug](), Damage(), PluginManager()
    manager.add(NAME)  # without the built-in observers, which raise errors on events that contradict each other
    drive = watch({**workload, "policy": "mixed"}, manager)
    drive.scheduler.planner.policy.policy = ArrivalOrderPolicy()
    with no_lookahead(), BUGS[bug](damage), contextlib.suppress(AssertionError):
        run(drive, workload)
    auditor = auditor_of(manager)
    first = auditor.findings[0]
    assert first.rule == FOUND_AS[bug]
    assert (first.uid, first.page) in damage.places

"""How many drafts each request gets, and when speculation is worth its time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pytest

from minisgl.config import ConfigError
from minisgl.core import EngineSpec, Req, SamplingParams
from minisgl.options.compose import compose
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.speculation import DraftProposer
from minisgl.plugins.speculation.adaptive import FIRST_DRAFTS, MAX_PAUSE, PROBE_STEPS, AdaptiveSpeculation, StepTimes
from minisgl.scheduler.build import build_scheduler
from minisgl.testing.drive import Drive, make_plugin
from minisgl.testing.null import NullEngine
from minisgl.testing.small import job

SPEC = EngineSpec(page_size=4, num_pages=200, max_running_requests=4, max_seq_len=400, vocab_size=50)


def drive(percent: int, overlap: bool = True, adapt: bool = True, max_drafts: int = 8) -> Drive:
    plugins = make_plugin("cache", "radix", page_size=4), make_plugin("scheduler", "mixed")
    return Drive(SPEC, *plugins, overlap=overlap, drafts=(max_drafts, percent, 1), adapt_drafts=adapt)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("percent", [0, 50, 100])
def test_drafts_follow_acceptance(overlap: bool, percent: int) -> None:
    """The outputs are right whatever is drafted. Drafts that are always right grow; wrong ones become rare."""
    simulated = drive(percent, overlap)
    simulated.run([job(uid, 9, 300) for uid in range(3)])
    counts = simulated.report.counts
    if percent == 0:
        assert counts.drafts < 650
    else:
        assert counts.accepted_drafts > 100
    full = drive(percent, overlap, adapt=False)
    full.run([job(uid, 9, 300) for uid in range(3)])
    all_drafts = full.report.counts
    if percent == 100:
        assert counts.drafts > all_drafts.drafts / 2
    elif percent == 50:
        assert counts.accepted_drafts / counts.drafts > 1.05 * all_drafts.accepted_drafts / all_drafts.drafts


@pytest.mark.parametrize("overlap", [False, True])
def test_counts_of_drafts(overlap: bool) -> None:
    """The scheduler's counts agree with each other, and with what the simulated engine accepted."""
    simulated = drive(60, overlap)
    simulated.run([job(uid, 9, 100) for uid in range(3)])
    counts, stats = simulated.report.counts, simulated.scheduler.stats()
    per_position = [stats[f"accepted_draft_tokens_per_pos_{k}"] for k in range(8)]
    assert sum(per_position) == stats["accepted_draft_tokens"] > 50
    assert per_position == sorted(per_position, reverse=True)
    assert per_position[0] < stats["verification_rows"] < stats["draft_tokens"]
    assert stats["draft_tokens"] == counts.drafts
    assert stats["accepted_draft_tokens"] == counts.accepted_drafts


class _All(DraftProposer):
    """Proposes as many drafts as it may."""

    max_drafts = 16

    def propose(self, reqs: Sequence[Req], positions: Sequence[int], limits: Sequence[int]) -> Sequence[Sequence[int]]:
        return [[1] * limit for limit in limits]


def of_one_request(max_drafts: int = 512) -> tuple[AdaptiveSpeculation, Req]:
    speculation = AdaptiveSpeculation(_All(), SPEC, max_drafts, clock=float)
    req = Req(0, [1, 2], SamplingParams(), 0)
    req.req_pool_idx = 2
    speculation.admitted([req])
    return speculation, req


def drafts(speculation: AdaptiveSpeculation, req: Req, step: int, limit: int = 100) -> int:
    row, position = np.array([2], np.int32), np.array([3], np.int32)
    limits = np.array([limit], np.int32)
    before = speculation._times
    speculation._times = _Always()  # type: ignore[assignment]
    (proposed,) = speculation.propose(step, [req], row, position, limits)
    speculation._times = before
    return len(proposed)


class _Always:
    def choose(self, rows: int, options: Sequence[tuple[int, float]]) -> int:
        return len(options) - 1


def adapt(speculation: AdaptiveSpeculation, step: int, count: int, accepted: int) -> None:
    speculation._adapt(step, np.array([2]), np.array([count]), np.array([accepted]))


def test_length_of_a_draft() -> None:
    """It doubles while all drafts are accepted. Else it follows the share of drafts that were accepted so far."""
    speculation, req = of_one_request()
    assert drafts(speculation, req, 1) == FIRST_DRAFTS
    adapt(speculation, 1, FIRST_DRAFTS, FIRST_DRAFTS)
    assert drafts(speculation, req, 2) == 2 * FIRST_DRAFTS
    assert drafts(speculation, req, 2, limit=3) == 3
    adapt(speculation, 2, 8, 8)
    adapt(speculation, 3, 16, 16)
    assert drafts(speculation, req, 4) == _All.max_drafts
    adapt(speculation, 4, 16, 2)
    assert drafts(speculation, req, 5) == 16  # many were accepted before: 0.7 · 0.92^15 > 0.05
    for step in range(5, 40):
        adapt(speculation, step, 16, 2)
    assert drafts(speculation, req, 40) == 5  # 0.98 · 0.5^4 > 0.05 > 0.98 · 0.5^5
    for step in range(40, 80):
        adapt(speculation, step, 16, 6 * (step % 2))
    assert drafts(speculation, req, 80) == 14  # 0.55 · 0.83^13 > 0.05
    assert drafts(of_one_request(max_drafts=2)[0], req, 1) == 2


def test_pause_after_wrong_drafts() -> None:
    """A request whose first draft is wrong again and again pauses for 1, 2, 4, … steps; a right one ends that."""
    speculation, req = of_one_request()
    step, pauses = 1, []
    for _ in range(34):  # until the drafts are unlikely to be accepted: 0.6 · 0.93^35 < 0.05
        adapt(speculation, step, 2, 0)
        step += 1
        assert drafts(speculation, req, step)
    for _ in range(10):
        adapt(speculation, step, 2, 0)
        first = step
        while not drafts(speculation, req, step):
            step += 1
        pauses.append(step - first)
    assert pauses == [1, 2, 4, 8, 16, 32, MAX_PAUSE, MAX_PAUSE, MAX_PAUSE, MAX_PAUSE]
    adapt(speculation, step, 2, 1)
    resumed = drafts(speculation, req, step)
    assert resumed >= 2
    adapt(speculation, step, 2, 0)
    assert 1 <= drafts(speculation, req, step + 1) <= resumed


@pytest.mark.parametrize(("percent", "low", "high"), [(0, 1.0, 1.0), (50, 1.6, 2.0), (80, 3.0, 3.4), (100, 4.9, 5.0)])
def test_tokens_a_step(percent: int, low: float, high: float) -> None:
    """Where verification is cheap, a step gives almost as many tokens as with four drafts in every step.

    With four drafts, each accepted with a probability of 50 or 80 %, these are 1.94 and 3.36.
    """
    speculation, req = of_one_request(max_drafts=4)
    rng, tokens, steps = np.random.default_rng(0), 0, 3000
    for step in range(steps):
        count = drafts(speculation, req, step)
        wrong = np.flatnonzero(rng.random(count) >= percent / 100)
        accepted = int(wrong[0]) if len(wrong) else count
        tokens += 1 + accepted
        if count:
            adapt(speculation, step, count, accepted)
    assert low <= tokens / steps <= high


def test_shares_of_accepted_drafts() -> None:
    """They stay between 0 and 1 after long runs, and are what they should be after many of them."""
    speculation, _ = of_one_request()
    for accepted in (16, 0, 16, 16, 3, 0, 0, 16, 1) * 5:
        adapt(speculation, 1, 16, accepted)
        assert 0 <= speculation._first_rate[2] <= 1
        assert 0 <= speculation._later_rate[2] <= 1
    for _ in range(200):
        adapt(speculation, 1, 4, 2)  # the first, and one of two later ones that say something
    assert speculation._first_rate[2] == pytest.approx(1.0)
    assert speculation._later_rate[2] == pytest.approx(0.5)
    for count in (1, 4):
        for _ in range(200):
            adapt(speculation, 1, count, 0)  # this says nothing about later drafts
    assert speculation._first_rate[2] == pytest.approx(0.0, abs=1e-6)
    assert speculation._later_rate[2] == pytest.approx(0.5)


def test_copies_get_long_drafts() -> None:
    """Where half of the first drafts are wrong, but few after a right one, the number of drafts stays large."""
    speculation, req = of_one_request()
    for step in range(100):
        adapt(speculation, step, 8, 6 * (step % 2))
    assert drafts(speculation, req, 100) == 13
    for step in range(100, 200):
        adapt(speculation, step, 8, step % 2)  # as many first drafts are right, and no other
    assert drafts(speculation, req, 200) == 2


class _Batch:
    """A batch of 8 rows: a plain step takes 1 s, and one that verifies takes ``verifying`` seconds."""

    def __init__(self, verifying: float, tokens: float, prompts: bool = False):
        self.times, self.verifying, self.tokens, self.prompts = StepTimes(), verifying, tokens, prompts
        self.now, self.step = 0.0, 0
        self.kinds: list[str] = []

    def run(self, steps: int) -> float:
        """Run steps. Return which share of them verified drafts."""
        self.kinds = []
        for _ in range(steps):
            pays = self.times.choose(8, [(16, self.tokens)]) is not None
            self.now += self.verifying if pays else 1.0
            self.times.add(self.step, 0 if pays else 8, 8 if pays else 0, 24 if pays else 8, 8 + self.prompts, self.now)
            self.step += 1
            self.kinds.append("verifying" if pays else "plain")
        return self.kinds.count("verifying") / steps


@pytest.mark.parametrize(("verifying", "tokens", "low", "high"), [(1.5, 2.5, 0.9, 1.0), (2.5, 1.5, 0.0, 0.05)])
def test_speculation_stops_where_it_does_not_pay(verifying: float, tokens: float, low: float, high: float) -> None:
    batch = _Batch(verifying, tokens)
    batch.run(20)
    assert low <= batch.run(1000) <= high
    assert len(set(batch.kinds)) == 2  # both kinds are measured again from time to time


def test_changed_times_are_noticed() -> None:
    """Speculation begins again when it pays again, and stops when it does not pay any more."""
    batch = _Batch(verifying=3.0, tokens=2.0)
    batch.run(500)
    assert batch.run(100) < 0.1
    batch.verifying = 1.1
    batch.run(40 * PROBE_STEPS)
    assert batch.run(100) > 0.9
    batch.verifying = 3.0
    batch.run(100)
    assert batch.run(100) < 0.1


@pytest.mark.parametrize(("a_draft", "best"), [(0.05, 4), (0.15, 2), (0.4, 1), (0.8, 0)])
def test_the_number_of_drafts_that_gains_most(a_draft: float, best: int) -> None:
    """Each draft takes ``a_draft`` of a plain step's time. Acceptance is 50 %: 1, 2 and 4 drafts give 1.5, 1.75, 1.94.

    The first step with four drafts takes 100 times as long as usual, as if a kernel was compiled.
    """
    times, now, chosen = StepTimes(), 0.0, []
    for step in range(2000):
        index = times.choose(8, [(8, 1.5), (16, 1.75), (32, 1.9375)])
        drafts = 0 if index is None else (1, 2, 4)[index]
        now += (1 + a_draft * drafts) * (100 if drafts == 4 and 4 not in chosen else 1)
        times.add(step, 0 if drafts else 8, 8 if drafts else 0, 8 + 8 * drafts, 8, now)
        chosen.append(drafts)
    assert chosen[1000:].count(best) > 0.95 * 1000
    assert set(chosen[1000:]) == {0, 1, 2, 4}  # all are measured again


def test_drafts_of_a_request_are_cut_to_the_number_that_gains_most() -> None:
    speculation, req = of_one_request()
    speculation._times = _Second()  # type: ignore[assignment]
    row, position = np.array([2], np.int32), np.array([3], np.int32)
    (proposed,) = speculation.propose(1, [req], row, position, np.array([4], np.int32))
    assert proposed == [1, 1]
    # Of the first drafts, 60 % are expected to be right, and of the drafts after a right one, 85 %.
    assert _Second.seen == [(1, 1.6), (2, pytest.approx(2.11)), (4, pytest.approx(2.911975))]


class _Second:
    seen: ClassVar[list[tuple[int, float]]] = []

    def choose(self, rows: int, options: Sequence[tuple[int, float]]) -> int:
        self.seen.extend(options)
        return 1


class _Model(DraftProposer):
    """Proposes as many drafts as it may, and takes ``seconds`` each time."""

    max_drafts, costly = 4, True

    def __init__(self, seconds: float):
        self.seconds, self.now, self.asked = seconds, 0.0, 0

    def propose(self, reqs: Sequence[Req], positions: Sequence[int], limits: Sequence[int]) -> Sequence[Sequence[int]]:
        self.now += self.seconds
        self.asked += 1
        return [[1] * limit for limit in limits]


def run_with_model(model: _Model, steps: int) -> AdaptiveSpeculation:
    """Run steps of one request with overlap. A plain step takes 1 s of the device, and a verifying one 1.2 s.

    The request's drafts count as accepted with a probability of 50 %.
    """
    speculation = AdaptiveSpeculation(model, SPEC, 512, clock=lambda: model.now)
    req = Req(0, [1, 2], SamplingParams(), 0)
    req.req_pool_idx = 2
    speculation.admitted([req])
    speculation._first_rate[2] = speculation._later_rate[2] = 0.5
    row, position, limits = np.array([2], np.int32), np.array([3], np.int32), np.array([4], np.int32)
    unread: list[tuple[int, int, float]] = []  # step, drafts, and when the device has computed it

    def read() -> None:
        step, count, end = unread.pop(0)
        model.now = max(model.now, end)
        speculation._times.add(step, int(not count), int(count > 0), 1 + count, 1, model.now)

    device_free = 0.0
    for step in range(steps):
        if unread and unread[0][1]:
            read()  # nothing is built before the result of a step that verifies
        (drafts,) = speculation.propose(step, [req], row, position, limits)
        device_free = max(model.now, device_free) + (1.2 if drafts else 1.0)
        unread.append((step, len(drafts), device_free))
        if len(unread) == 2:
            read()
    return speculation


@pytest.mark.parametrize(("seconds", "low", "high"), [(0.3, 0.9, 1.0), (0.8, 0.0, 0.1), (3.0, 0.0, 0.1)])
def test_a_costly_proposer_is_asked_where_its_drafts_pay(seconds: float, low: float, high: float) -> None:
    """The time to draft counts as one of the step that verifies, also if it passes while a plain step is computed.

    With 0.3 s to draft, four drafts give 1.94 tokens in 1.5 s; with 0.8 s, in 2 s.
    """
    model = _Model(seconds)
    run_with_model(model, 1000)
    assert low <= model.asked / 1000 <= high


def test_time_to_draft_while_a_plain_step_is_computed() -> None:
    """What a plain step takes longer than usual, because drafts are made meanwhile, is a cost of the drafts."""
    times = StepTimes()
    for step in range(4):
        if step == 3:
            times.drafted(4)
        times.add(step, 1, 0, 1, 1, step + 2.0 * (step == 3))
    times.add(4, 0, 1, 5, 1, 5.0 + 1.2)
    assert {drafts: time.seconds for (_, drafts), time in times._times.items()} == {-1: 1.0, 8: pytest.approx(3.2)}


def test_steps_with_prompts_are_not_measured() -> None:
    """If every step has prompts, no time is known, and drafts are verified all the same."""
    batch = _Batch(verifying=2.0, tokens=2.0, prompts=True)
    assert batch.run(200) > 0.9


def test_drafts_need_their_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ``plugins/speculation/verification.py``, a scheduler with drafts is refused; one without is built."""
    monkeypatch.setattr("minisgl.scheduler.build.exists", lambda name: not name.endswith("speculation.verification"))
    manager, engine = PluginManager.load(), NullEngine(SPEC)
    with pytest.raises(ConfigError, match="plugins/speculation/verification, which is missing"):
        build_scheduler(compose(manager, ["device=cpu", "speculation=ngram"]), manager, engine)  # type: ignore[arg-type]
    build_scheduler(compose(manager, ["device=cpu"]), manager, engine)  # type: ignore[arg-type]

"""The stages of the course: golden counts, and the gains that the course promises.

With ``ignore_eos``, the counts of stages 1 to 7 do not depend on the sampled tokens, and those of stages 8 and 9 are
counted with recorded ones. So an engine without a model gives the same counts as the real engine; a test compares the
two for three stages.
"""

from __future__ import annotations

import dataclasses
import json
import xml.etree.ElementTree as ET
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from minisgl.chapters.ladder import recorded
from minisgl.chapters.ladder import stages as bench
from minisgl.chapters.ladder.picture import CHARTS, compare, draw
from minisgl.chapters.ladder.stages import STAGES, Stage
from minisgl.chapters.ladder.workload import HANDBOOK_TOKENS, HANDBOOKS, LONG_TOKENS, Arrival, without_cache, workload
from minisgl.core import EngineSpec
from minisgl.options.compose import compose
from minisgl.plugin_manager.manager import PluginManager
from minisgl.testing.null import NullEngine

WITHOUT_CACHE = 440_970
#           computed prefilled steps running  gap waits decode steps
GOLDEN = {
    1: (20_034, 19_142, 936, 1, 1, 936, 892),
    2: (20_034, 19_142, 648, 4, 4, 648, 637),
    3: (20_034, 19_142, 304, 4, 1_604, 304, 266),
    4: (20_034, 19_142, 143, 16, 5_196, 143, 135),
    5: (5_058, 4_166, 143, 16, 1_211, 143, 134),
    6: (5_058, 4_166, 142, 16, 128, 142, 103),
    7: (5_058, 4_166, 144, 16, 128, 1, 104),
    8: (5_439, 4_166, 77, 16, 152, 58, 6),
    9: (5_442, 4_182, 76, 16, 294, 53, 7),
}
WORST_WAITS = {1: 17_996, 2: 16_647, 3: 14_162, 4: 5_678, 5: 302, 6: 412, 7: 562, 8: 575, 9: 518}


@pytest.fixture(scope="module")
def arrivals() -> list[Arrival]:
    return workload()


@pytest.fixture(scope="module")
def found() -> dict[int, Stage]:
    return {number: Stage(**stage) for number, stage in zip(STAGES, bench.count()["stages"], strict=True)}


@pytest.mark.parametrize("number", [5, 7])
def test_second_run_on_the_same_engine_has_a_cold_cache(number: int, arrivals: list[Arrival]) -> None:
    manager = PluginManager.load(light=True)
    config = compose(manager, [f"stage={number}"])
    assert config.num_pages is not None and config.max_seq_len is not None
    spec = EngineSpec(config.page_size, config.num_pages, config.max_running_requests, config.max_seq_len, 2048)
    engine = NullEngine(spec)
    for _ in range(2):
        stage, _ = bench.serve(config, manager, engine, arrivals, number)
        assert counts(stage) == GOLDEN[number]


def test_all_stages_have_the_same_kv_memory() -> None:
    manager = PluginManager.load(light=True)
    pools = {(c.num_pages or 0) * c.page_size for c in (compose(manager, [f"stage={n}"]) for n in STAGES)}
    assert pools == {8192}


def counts(stage: Stage) -> tuple[int, ...]:
    s = stage
    return s.computed, s.prefilled, s.steps, s.most_running, s.worst_gap, s.waits, s.decode_steps


def test_workload(arrivals: list[Arrival]) -> None:
    prompts = [arrival.request.prompt_ids for arrival in arrivals]
    assert len(prompts) == 44
    assert [len(prompt) for prompt in prompts if len(prompt) > 1000] == [LONG_TOKENS] * 2
    questions = [prompt for prompt in prompts if len(prompt) < LONG_TOKENS]
    assert len({tuple(prompt[:HANDBOOK_TOKENS]) for prompt in questions}) == HANDBOOKS
    assert len({tuple(prompt[: HANDBOOK_TOKENS + 16]) for prompt in questions}) > 20
    assert [a.step for a in arrivals] == sorted(a.step for a in arrivals)
    assert without_cache([a.request for a in arrivals]) == WITHOUT_CACHE
    assert workload() == arrivals
    assert workload(1) != arrivals


@pytest.mark.parametrize("number", STAGES)
def test_golden_counts(found: dict[int, Stage], number: int) -> None:
    assert counts(found[number]) == GOLDEN[number]
    assert found[number].worst_wait == WORST_WAITS[number]


def test_gains_that_the_course_promises(found: dict[int, Stage], arrivals: list[Arrival]) -> None:
    s = found
    prompts = sum(len(a.request.prompt_ids) for a in arrivals)
    outputs = sum(a.request.output_len for a in arrivals)
    assert s[1].computed == prompts + outputs - len(arrivals)  # each position is computed once
    assert s[1].computed < WITHOUT_CACHE / 20  # stage 1: the KV cache
    assert s[1].steps == outputs  # stage 1 serves one request at a time
    assert s[2].steps < 0.75 * s[1].steps  # stage 2: batches
    assert s[3].steps < 0.55 * s[2].steps  # stage 3: continuous batching
    assert (s[3].most_running, s[4].most_running) == (4, 16)  # stage 4: the same memory in pages
    assert s[4].steps < 0.5 * s[3].steps
    assert s[4].worst_gap > 3 * s[3].worst_gap  # the price of stage 4
    assert s[5].prefilled < 0.25 * s[4].prefilled  # stage 5: shared prefixes
    own = prompts - 42 * HANDBOOK_TOKENS
    assert s[5].prefilled <= 1.02 * (own + HANDBOOKS * HANDBOOK_TOKENS)  # close to the minimum
    assert s[5].worst_gap > LONG_TOKENS  # a long prompt still delays all other requests
    assert s[6].worst_gap <= 128  # stage 6: chunks
    assert s[6].steps <= 1.05 * s[5].steps
    assert all(s[n].waits == s[n].steps for n in range(1, 7))
    assert s[7].waits <= 0.02 * s[7].steps  # stage 7: overlap
    assert counts(s[7])[:2] == counts(s[6])[:2]
    assert s[7].steps <= s[6].steps + 3
    assert s[7].worst_gap <= 128
    assert s[8].steps < 0.6 * s[7].steps  # stage 8: drafts, in answers that go on after their end
    assert s[8].computed > s[7].computed and s[8].waits > 50  # its price
    assert s[9].worst_wait < s[8].worst_wait  # stage 9: questions before long prompts
    assert s[5].worst_wait < s[6].worst_wait < s[7].worst_wait < s[8].worst_wait  # the price of stages 6 to 8
    ended = [Stage(**stage) for stage in bench.count(numbers=[7, 8], arrivals=recorded.ended(arrivals))["stages"]]
    assert ended[1].steps > 0.9 * ended[0].steps  # answers that end: nothing gained


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """Return the report of stages 6 to 8 on the real engine."""
    return bench.measure(["device=cpu"], (6, 7, 8))


def test_real_engine_has_the_same_counts(report: dict[str, Any]) -> None:
    six, seven, eight = (Stage(**stage) for stage in report["stages"])
    assert counts(six) == GOLDEN[6]
    assert counts(seven) == GOLDEN[7]
    assert six.launches is not None and six.launches > 50
    assert seven.launches == eight.launches == 1
    assert abs(eight.steps - GOLDEN[8][2]) <= 6  # an answer that differs in its last bits has other drafts
    assert report["requests"] == 44
    assert report["same_answers"] >= 42  # the shape of a batch changes the last bits of float32 results
    assert all(stage.seconds is not None and stage.seconds > 0 for stage in (six, seven, eight))


def test_command_line(
    found: dict[int, Stage], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = [asdict(replace(stage, launches=253, seconds=1.5)) for stage in found.values()]
    report = {
        "machine": {"device": "a test", "dtype": "float32"},
        "requests": 44,
        "without_cache": WITHOUT_CACHE,
        "stages": stages,
        "same_answers": 43,
    }
    monkeypatch.setattr(bench, "measure", lambda options, numbers: {**report, "options": options})
    svg, out = tmp_path / "out.svg", tmp_path / "out.json"
    bench.main(["device=cpu", "--plot", str(svg), "--json", str(out)])
    printed = capsys.readouterr().out
    for text in ("5,196", "253", "440,970 tokens", "43 of 44", "continuous batching"):
        assert text in printed
    assert json.loads(out.read_text())["options"] == ["device=cpu"]
    root = ET.fromstring(svg.read_text())
    bars = [node for node in root.iter() if node.tag.endswith("rect")]
    assert sum("data-stage" in bar.attrib for bar in bars) == len(CHARTS) * len(STAGES)
    described = next(node.text or "" for node in root.iter() if node.tag.endswith("desc"))
    assert "Worst gap: 1, 4, 1,604, 5,196, 1,211, 128, 128, 152, 294." in described


def test_plugin_in_one_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first exercise of the course: a change in one line of a policy reduces the worst gap."""
    source = (Path(__file__).parents[3] / "chapters" / "00_start" / "mine.py").read_text(encoding="utf-8")
    before, after = "prompts or answers", "answers + prompts"
    assert source.count(before) == 1
    gaps = []
    for name, text in (("before.py", source), ("after.py", source.replace(before, after))):
        (tmp_path / name).write_text(text, encoding="utf-8")
        report = bench.count([f"plugins={tmp_path / name}", "scheduler=mine"], [6])
        gaps += [stage["worst_gap"] for stage in report["stages"]]
    assert gaps == [2_124, 128]


def test_unknown_count_is_not_drawn(found: dict[int, Stage]) -> None:
    """There is no column of launches if no stage recorded launches."""
    svg = draw(list(found.values()), WITHOUT_CACHE)
    assert svg.count("data-stage") == (len(CHARTS) - 1) * len(STAGES)
    assert "launches" not in svg and f"{WITHOUT_CACHE:,}" in svg


def test_loss_is_drawn_as_a_price(found: dict[int, Stage]) -> None:
    """The worst gap grows where more requests share the device: the picture shows a price, and later a gain."""
    svg = draw(list(found.values()), WITHOUT_CACHE)
    kinds = {}
    for bar in ET.fromstring(svg).iter():
        if bar.get("data-count") == "worst gap":
            kinds[int(bar.attrib["data-stage"])] = bar.attrib["data-kind"]
    assert kinds == {
        1: "even",
        2: "price",
        3: "price",
        4: "price",
        5: "gain",
        6: "gain",
        7: "even",
        8: "price",
        9: "price",
    }


def test_more_requests_at_a_time_are_better() -> None:
    running = next(chart for chart in CHARTS if chart.rises)
    assert (compare(running, 16, 4), compare(running, 4, 16), compare(running, 4, 4)) == ("gain", "price", "even")


def test_picture_names_every_stage(found: dict[int, Stage]) -> None:
    """A new stage gets its line without a change of the picture."""
    more = [*found.values(), dataclasses.replace(found[8], number=9, name="a ninth idea")]
    texts = {node.text for node in ET.fromstring(draw(more, WITHOUT_CACHE)).iter() if node.tag.endswith("text")}
    assert {*STAGES.values(), "a ninth idea", "no KV cache"} <= texts

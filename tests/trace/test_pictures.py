"""Pictures and the viewer show exactly the events of the trace, and need no network."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from html import escape as html_escape
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from minisgl.testing.drive import Job
from minisgl.testing.simulate import simulate
from minisgl.testing.small import job, no_lookahead
from minisgl.trace import events as ev
from minisgl.trace.__main__ import main
from minisgl.trace.chrome import chrome
from minisgl.trace.draw import gap, pages, staircase, timeline, timelines, tree
from minisgl.trace.history import gaps, state_at, turns
from minisgl.trace.read import Trace, TraceError
from minisgl.trace.state import FREE
from minisgl.trace.summary import show, summarize
from minisgl.trace.view import difference, frame, page, run_data

Marks = list[dict[str, str]]


def clients() -> list[Job]:
    """Return requests with two common prefixes, one that diverges after a page, and one that is aborted."""
    family = [job(u, 14 + u % 3, 12, first=u % 2, arrive=2 * u) for u in range(1, 9)]
    stem = list(family[1].prompt)
    return [*family, job(9, 9, 8, abort=3), Job(10, [*stem[:4], *[7] * 9], family[0].params, arrive=3)]


@pytest.fixture(scope="module")
def run() -> Trace:
    with no_lookahead():
        return simulate(
            clients(), page_size=4, num_pages=16, max_running_requests=3, max_prefill_tokens=8, max_seq_len=60
        )


@pytest.fixture(scope="module")
def other() -> Trace:
    with no_lookahead():
        return simulate(
            clients(), policy="prefill_first", page_size=4, num_pages=16, max_running_requests=3, max_seq_len=60
        )


@pytest.fixture(scope="module", params=[1, 3], ids="rounds={}".format)
def drafting(request: pytest.FixtureRequest) -> Trace:
    """Return a run of three requests with up to four drafts in a row, of which about 60 % are right."""
    jobs = [job(u, 10, 30, first=u) for u in range(3)]
    sizes = {"page_size": 4, "num_pages": 64, "max_running_requests": 3, "max_seq_len": 60}
    rounds = request.param
    run = simulate(jobs, **sizes, drafts=(4, 60, 1), rounds=rounds, full_drafts=rounds > 1)
    assert max(event.rounds for event in events_of(run, ev.Batch)) == rounds
    return run


def marks(svg: str, *kinds: str) -> Marks:
    """Return the ``data-`` attributes of the SVG's marks of some kinds."""
    root = ET.fromstring(svg)
    found = [{k.removeprefix("data-"): v for k, v in e.attrib.items() if k.startswith("data-")} for e in root.iter()]
    return [mark for mark in found if mark.get("kind") in kinds]


def events_of(trace: Trace, kind: type[Any]) -> list[Any]:
    return [event for event in trace if isinstance(event, kind)]


def test_run_has_every_kind_of_event(run: Trace) -> None:
    s = summarize(run)
    assert s.retractions and s.cached_tokens and s.evicted_pages and s.splits and s.discarded_tokens
    assert s.prefill_tokens + s.decode_tokens == sum(
        sum(batch.num_scheduled_tokens) for batch in events_of(run, ev.Batch)
    )
    assert s.worst_gap is not None
    assert s.worst_gap.num_tokens == max(gap.num_tokens for gap in gaps(run))


def test_timeline_shows_rows_and_retractions(run: Trace) -> None:
    svg = timeline(run)
    rows = Counter()
    for batch in events_of(run, ev.Batch):
        for i, uid in enumerate(batch.uids):
            kind = "decode" if i < batch.num_decode else "prefill"
            rows[batch.step, uid, kind, batch.num_computed_tokens[i], batch.num_scheduled_tokens[i]] += 1
    drawn = Counter(
        (int(m["step"]), int(m["uid"]), m["kind"], int(m["start"]), int(m["count"]))
        for m in marks(svg, "prefill", "decode")
    )
    assert drawn == rows
    assert Counter((int(m["step"]), int(m["uid"])) for m in marks(svg, "retract")) == Counter(
        (event.step, event.uid) for event in events_of(run, ev.Retract)
    )
    work = Counter[int]()
    for m in marks(svg, "work-prefill", "work-decode"):
        work[int(m["step"])] += int(m["tokens"])
    assert work == {batch.step: sum(batch.num_scheduled_tokens) for batch in events_of(run, ev.Batch)}
    cached = sum(int(m["count"]) for m in marks(svg, "cached"))
    assert cached == sum(len(event.pages) * 4 for event in events_of(run, ev.Match))
    some = {int(m["step"]) for m in marks(timeline(run, range(3, 9)), "prefill", "decode")}
    assert some == set(range(3, 9))


def test_drafts(drafting: Trace, run: Trace) -> None:
    """Pictures, viewer, summary and Chrome's format show the drafts of each row, and how many were accepted."""
    results = {event.step: event for event in events_of(drafting, ev.Done)}
    rows = {}  # (step, uid) -> (drafts, accepted), for verification rows
    for batch in events_of(drafting, ev.Batch):
        done = results[batch.step]
        for i, tokens in enumerate(batch.drafts, batch.num_decode):
            if done.kept is None or done.kept[i]:
                rounds = 1 if done.rounds is None else len(done.rounds[i])
                rows[batch.step, batch.uids[i]] = rounds * len(tokens), len(done.runs[i]) - rounds
    drafts, accepted = (sum(counts) for counts in zip(*rows.values(), strict=True))
    assert drafts > accepted > 20

    s = summarize(drafting)
    assert (s.draft_tokens, s.accepted_draft_tokens) == (drafts, accepted)
    assert s.output_tokens == 90
    assert s.prefill_tokens == 30
    assert len(s.inter_token_latencies) == 90 - 3

    svg = timeline(drafting)
    for kind, index in (("accepted", 1), ("rejected", 0)):
        drawn = {(int(m["step"]), int(m["uid"])): int(m["count"]) for m in marks(svg, kind)}
        expected = {at: n[1] if index else n[0] - n[1] for at, n in rows.items()}
        assert drawn == {at: count for at, count in expected.items() if count}
        assert f"{kind} draft" in svg
        assert f"{kind} draft" not in timeline(run)

    shown = {(step["s"], r[0]): tuple(r[5:]) for step in run_data(drafting)["steps"] for r in step["r"] if r[5:]}
    assert shown == rows
    words = [event for step in run_data(drafting)["steps"] for event in step["e"] if event[0] == "verify"]
    assert len(words) == len(rows)
    spans = [event for event in chrome(drafting)["traceEvents"] if event["name"] == "verify"]
    assert {(e["args"]["step"], e["tid"]): (e["args"]["drafts"], e["args"]["accepted"]) for e in spans} == rows


def test_draft_tokens_in_the_printed_summary(drafting: Trace) -> None:
    console = Console(record=True, width=120)
    show(drafting, summarize(drafting), console)
    assert re.search(r"draft tokens +\d+ +\d+ accepted", console.export_text())


def test_timelines_of_two_runs(run: Trace, other: Trace) -> None:
    svg = timelines([("mixed", run), ("prefill first", other)])
    assert len(marks(svg, "prefill", "decode")) == sum(
        len(b.uids) for t in (run, other) for b in events_of(t, ev.Batch)
    )
    assert "mixed" in svg and "prefill first" in svg


@pytest.mark.parametrize("part", [0.2, 0.5, 0.8])
def test_tree_and_page_map_show_the_state(run: Trace, part: float) -> None:
    step = int(part * len(events_of(run, ev.Batch)))
    state = state_at(run, step)
    svg = tree(run, step)
    shown = {tuple(map(int, m["pages"].split())): (int(m["users"]), int(m["depth"])) for m in marks(svg, "node")}
    hidden = {int(page) for m in marks(svg, "more") for page in m["pages"].split()}
    for node in state.tree.nodes():
        if not hidden.intersection(node.pages):
            assert shown.pop(tuple(node.pages)) == (node.users, node.depth)
    assert not shown
    users = {int(m["uid"]): int(m["page"]) for m in marks(svg, "user")}
    assert users == {req.uid: req.cached_pages[-1] for req in state.running.values() if req.cached_pages}
    pool = marks(pages(run, step), "page")
    assert [int(m["owner"]) for m in pool] == state.owner.tolist()
    assert [int(m["users"]) for m in pool] == state.ref_counts.tolist()
    entries = marks(pages(run, step, tables=True), "entry")
    for req in state.running.values():
        row = [int(m["page"]) for m in entries if int(m["uid"]) == req.uid]
        assert row == state.page_table[req.req_pool_idx][: len(row)].tolist()
        assert len(row) == -(-req.num_computed_tokens // 4) or req.state == "prefill"


def test_page_map_of_large_pool_shows_used_pages() -> None:
    trace = simulate(
        clients(), page_size=4, num_pages=5000, max_running_requests=3, max_prefill_tokens=8, max_seq_len=60
    )
    used = sorted({page for event in events_of(trace, ev.Allocate) for page in event.pages})
    assert 10 < len(used) < 200
    assert run_data(trace)["map"] == used
    for turn, state in turns(trace):
        assert set((state.owner != FREE).nonzero()[0]) <= set(used)
        if turn.step % 7 == 3:
            svg = pages(trace, turn.step)
            found = {int(m["page"]): int(m["owner"]) for m in marks(svg, "page")}
            assert found == {page: int(state.owner[page]) for page in used}
            assert f"and {5000 - len(used):,} more pages, which this run never used" in svg
            assert float(ET.fromstring(svg).get("height", "")) < 600
    small = simulate(
        clients(), page_size=4, num_pages=640, max_running_requests=3, max_prefill_tokens=8, max_seq_len=60
    )
    assert run_data(small)["map"] == list(range(640)) and not run_data(small)["unused"]


def test_tree_shows_text_of_tokens(run: Trace) -> None:
    step = len(events_of(run, ev.Batch)) // 2
    state = state_at(run, step)
    for node in state.tree.nodes():
        for req in state.running.values():
            if node.pages[-1] in req.cached_pages:  # the node is part of the prefix of this request
                at = req.cached_pages.index(node.pages[0]) * 4
                assert state.token_ids(node.pages) == req.token_ids[at : at + 4 * len(node.pages)]

    def text(ids: Sequence[int]) -> str:
        return "<" + " ".join(map(str, ids)) + ">"

    leaf = next(node for node in state.tree.nodes() if not node.children)
    assert html_escape(text(state.token_ids(leaf.pages))[:20]) in tree(run, step, text)
    data = run_data(run, text)
    shown = {data["texts"][node[1]] for node in data["trees"][data["steps"][step]["n"]]}
    assert shown == {text(state.token_ids(node.pages)) for node in state.tree.nodes()}


def test_staircase_shows_rows_of_one_request(run: Trace) -> None:
    rows = [(turn.step, row.start, row.count) for turn, _ in turns(run) for row in turn.rows if row.uid == 3]
    drawn = [(int(m["step"]), int(m["start"]), int(m["count"])) for m in marks(staircase(run, 3), "prefill", "decode")]
    assert drawn == rows
    with pytest.raises(TraceError, match="no row of request 77"):
        staircase(run, 77)


def test_worst_gap_is_marked(run: Trace, other: Trace) -> None:
    worst = [m["tokens"] for m in marks(gap([("chunks", run), ("whole", other)]), "worst")]
    assert worst == [str(summarize(t).worst_gap.num_tokens) for t in (run, other)]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "draw",
    [timeline, lambda t: tree(t, 9), lambda t: pages(t, 9, True), lambda t: staircase(t, 2), lambda t: gap([("a", t)])],
)
def test_picture_has_description_and_themes_but_no_script(draw: Callable[[Trace], str], run: Trace) -> None:
    svg = draw(run)
    root = ET.fromstring(svg)
    assert root.get("role") == "img"
    title, desc = root[0], root[1]
    assert root.get("aria-labelledby") == f"{title.get('id')} {desc.get('id')}"
    assert title.text and desc.text and any(c.isdigit() for c in desc.text)
    assert "prefers-color-scheme:dark" in svg and '[data-md-color-scheme="slate"]' in svg
    assert "<script" not in svg and "href" not in svg
    assert draw(run) == svg  # deterministic, so that a page with the picture does not change
    left, top, width, height = map(float, root.get("viewBox", "").split())
    for e in root.iter():
        if e.tag.endswith("rect"):
            assert left <= float(e.get("x", 0)) and float(e.get("x", 0)) + float(e.get("width", 0)) <= left + width
            assert top <= float(e.get("y", 0)) and float(e.get("y", 0)) + float(e.get("height", 0)) <= top + height


def test_empty_run_can_be_drawn() -> None:
    empty = simulate([], num_pages=4)
    assert ET.fromstring(timeline(empty)).get("role") == "img"
    assert run_data(empty)["steps"] == []


def test_viewer_data_give_the_state_of_every_step(run: Trace) -> None:
    """Adding up the changes of the steps gives the state after each step."""
    data = json.loads(json.dumps(run_data(run)))
    owner, users = [-1] * 16, [0] * 16
    tables: dict[int, list[int]] = {}
    for step, (turn, state) in zip(data["steps"], turns(run), strict=True):
        for i, value in step.get("p", []):
            owner[i] = value
        for i, value in step.get("u", []):
            users[i] = value
        for uid, *change in step.get("t", []):
            tables[uid] = tables.get(uid, [])[: change[0]] + change[1] if change else []
        assert (owner, users) == (state.owner.tolist(), state.ref_counts.tolist())
        for req in state.running.values():
            assert tables[req.uid] == [p for p in state.page_table[req.req_pool_idx].tolist() if p >= 0]
        assert [row[:3] for row in step["r"]] == [[r.uid, r.start, r.count] for r in turn.rows]
        tree = data["trees"][step["n"]]
        assert [(data["lists"][n[1]], n[2]) for n in tree] == [(n.pages, n.users) for n in state.tree.nodes()]


def test_page_is_self_contained(run: Trace, other: Trace) -> None:
    html = page([replace(run, name="</script><script>"), other], title="</script><script>alert(1)//")
    assert not re.search(r"(src|href)=[\"'](?!data:)", html)
    assert "http" not in html.replace("http://www.w3.org/2000/svg", "")
    assert html.count("<script") == 2
    (embedded,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', html, re.DOTALL)
    data = json.loads(embedded)
    assert [len(r["steps"]) for r in data["runs"]] == [len(events_of(t, ev.Batch)) for t in (run, other)]
    assert data["runs"][0]["name"] == "</script><script>"
    assert data["difference"]["step"] == difference(run, other)["step"]  # type: ignore[index]


def test_frame_contains_the_page(run: Trace) -> None:
    html = page([run])
    (inside,) = re.findall(r'^<iframe title="[^"]+" style="[^"]+" srcdoc="([^"]*)"></iframe>$', frame(html))
    assert unescape(inside) == html


def test_first_difference_of_two_runs(run: Trace, other: Trace) -> None:
    assert difference(run, run) is None
    found = difference(run, other)
    assert found is not None
    ones, twos = ([sorted((r.uid, r.start, r.count) for r in turn.rows) for turn, _ in turns(t)] for t in (run, other))
    assert ones[: found["step"]] == twos[: found["step"]]
    assert ones[found["step"]] != twos[found["step"]]


def test_chrome_format_has_each_step_and_row(run: Trace) -> None:
    found = chrome(run)["traceEvents"]
    assert all({"ph", "pid", "name"} <= event.keys() for event in found)
    spans = [event for event in found if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in spans)
    rows = [event for event in spans if event["name"] in ("prefill", "decode")]
    assert len(rows) == sum(len(batch.uids) for batch in events_of(run, ev.Batch))
    assert sum("rows" in event["args"] for event in spans) == len(events_of(run, ev.Batch))
    assert sum(event["name"] == "retract" for event in found) == len(events_of(run, ev.Retract))


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from minisgl.testing.planted import PLANTED, planted

    bug = PLANTED["duplicates freed before remap"]
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    with planted():
        bug.run(good)
    with planted(bug.plant), pytest.raises(AssertionError):
        bug.run(bad)
    html, out = tmp_path / "run.html", tmp_path / "run.json"
    assert main([str(good), "--html", str(html), "--chrome", str(out)]) == 0
    assert "All promises that a trace can show were kept." in capsys.readouterr().out
    assert html.stat().st_size > 10_000
    assert json.loads(out.read_text())["traceEvents"]
    assert main([str(bad), str(good)]) == 1
    output = capsys.readouterr().out
    assert "promise 4 is broken at step 1, request 2, page 3" in output
    assert "The runs differ first at step" in output
    svg = tmp_path / "picture.svg"
    for picture in ("timeline", "tree", "pages", "tables", "staircase", "gap"):
        assert main([str(good), "--draw", picture, "-o", str(svg)]) == 0
        assert "data-kind" in svg.read_text()
    assert main([str(good), "--draw", "timeline", "--steps", "2:4"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("</svg>")
    for arguments, message in (
        (["--draw", "tree", "--step", "400"], "has no step 400: its last step is 15."),
        (["--draw", "timeline", "--steps", "9"], "--steps 9: write A:B"),
        (["--html", str(tmp_path / "no" / "x.html")], "x.html cannot be written: No such file or directory."),
        ([str(good), str(good)], "3 files were given"),
        ([str(tmp_path / "no.jsonl")], f"minisgl.trace: There is no file {tmp_path / 'no.jsonl'}."),
        (["--step", "3"], "--step needs --draw tree or --draw pages or --draw tables; without, it has no effect."),
        (["--step", "3", "--draw", "timeline"], "--step needs --draw tree"),
        (["--step", "0", "--html", str(html)], "--step needs --draw tree"),
        (["--steps", "2:4", "--draw", "gap"], "--steps needs --draw timeline"),
        (["--request", "0"], "--request needs --draw staircase"),
        (["--text"], "--text needs --draw tree or --html"),
        (["--text", "--draw", "pages"], "--text needs --draw tree or --html"),
        (["-o", str(svg)], "-o needs --draw"),
        (["--html", str(html), "-o", str(svg)], "-o needs --draw"),
        ([str(good), "--draw", "tree"], "--draw tree needs one trace; two were given."),
        ([str(good), "--chrome", str(out)], "--chrome needs one trace; two were given."),
    ):
        assert main([str(good), *arguments]) == 2
        assert message in " ".join(capsys.readouterr().err.split())

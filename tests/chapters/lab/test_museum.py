"""The museum: each piece breaks the promise that it names, its base breaks none, and a file that does nothing fails."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from difflib import unified_diff
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from minisgl.chapters.lab.catalog import labs
from minisgl.chapters.lab.cli import main
from minisgl.chapters.lab.museum import command, runs
from minisgl.chapters.lab.museum.calls import driver_of, play_calls, show_calls
from minisgl.chapters.lab.museum.pieces import Piece, find_piece, pieces
from minisgl.chapters.lab.museum.runs import Counts, missing, play, run, symptom, violation_of
from minisgl.config import ConfigError
from minisgl.trace.check import Checker
from minisgl.trace.read import read
from minisgl.trace.violation import Violation

from .test_solutions import can_run

EVERY = [pytest.param(piece, id=piece.name) for piece in pieces() if not piece.driver]
KERNELS = [
    pytest.param(piece, id=piece.name, marks=can_run(piece.lab)) for piece in pieces() if piece.driver == "launches"
]
CALLED = [pytest.param(piece, id=piece.name) for piece in pieces() if piece.driver not in ("", "launches")]
SCHEDULES = range(1, 4)
ROOT = Path(__file__).resolve().parents[3]

DOES_NOTHING = {
    "tree": (
        "return self._descend(root, 0, NO_PAGES, key)",
        "return MatchResult(Handle(root, 0, self._changes), NO_PAGES, 0)",
    ),
    "blocks": ("            if each not in self.blocks:\n", "            if each is not None:\n"),
    "handover": ("if end <= start:", "if end <= end:"),
    "fences": ("if fence <= step]", "if fence < step]"),  # a page waits one step longer than it must
    "snapshots": ("                end = border\n", "                end = 0\n"),
    "warm": ("sorted(waiting, key=self.turn)", "waiting"),  # in order of arrival
    "classes": ("        if not budget.tokens:\n", "        if budget.tokens:\n"),  # an urgent request waits
}
"""Base → a change with which the plugin keeps its promises by leaving its work undone."""
MENDS = {
    "tally": (
        "        self.evictable_pages -= count\n",
        "        self.evictable_pages = sum(len(node.pages) for node in self._nodes() if not node.users)\n",
    ),
    "stale": (
        "        if handle.changes != self._changes or not handle.used:\n            return self.match(key)\n",
        "        if handle is not None:\n            return self.match(key)\n",
    ),
    "inflight": (
        '        self.check_owner(pages, owner, "retire")\n        self.owner[pages] = RETIRING\n'
        "        self.num_retiring += len(pages)\n        self._waiting.setdefault(after, []).append(pages)\n",
        "        self.most_waiting += 0\n        return super().retire(pages, owner, after)\n",
    ),
    "hangup": (
        "        self.aborted += 1\n        del self.arrived[uid]\n        self.first.pop(uid, None)\n"
        "        self.latest.pop(uid, None)\n        self.gaps.pop(uid, None)\n",
        "        self.aborted += 1\n        self._complete(uid)\n",
    ),
    "leftover": (
        "        self._pad(rows)\n",
        "        self.host[:, rows:] = [[0], [0], [self.scratch], [self.scratch_row], [1]]\n",
    ),
    "departed": ("for transfer in receiving:", "for transfer in (*sending, *receiving):"),
    "twice": (
        "            out = torch.cat([self.comm.all_reduce(half.contiguous()) for half in out.tensor_split(2)])\n",
        "            out = self.comm.all_reduce(out)\n",
    ),
    "halfway": (
        "        allowed[self.end_ids] = self.automaton.is_final(state)\n",
        "        for token in self.end_ids:\n            allowed[token] = self.automaton.is_final(state)\n",
    ),
    "cold": ("w.skipped_steps >= self.patience", "w.skipped_steps >= self.patience - 2"),
    "swapped": (
        "        asked = [i for i, row in enumerate(rows) if limits[i] and self.lengths[row] > self.match_tokens]\n",
        "        asked = [i for i, row in enumerate(rows) if self.lengths[row] > self.match_tokens]\n",
    ),
    "slots": ("slots = self.slots[: len(expert)].zero_()", "slots = self.slots = torch.zeros_like(expert).long()"),
    "company": ("inner = x.masked_fill(large, 0.0)", "inner = torch.where(large, 0.0, x)"),
    "victim": (
        "        for uid in retract:\n            rows.pop(uid, None)\n        return retract\n",
        "        for uid in {*rows} & {*retract}:\n            del rows[uid]\n        return retract\n",
    ),
}
"""Piece → a change of its base that is right too, as students mend it in other ways."""


FALSE_MENDS = {
    "hangup": [
        (
            "        self.aborted += 1\n",
            "        self.gaps.clear()\n",
            "event 31 still goes wrong, in another way: A gap is",
        ),
        ("        self.ended.append(self.timing(req.uid))\n", "", "1 request ended, and `ended` has 0 timings"),
    ],
    "swapped": [
        (
            "            drafts[i] = run\n",
            "            drafts[i] = run if i == asked[0] else ()\n",
            "drafts are none; expected",
        ),
        ("if limits[i] and", "if all(limits) and", "event 6 now goes wrong: The drafts are"),
        (" and self.lengths[row] > self.match_tokens]", "]", "In event 4 of the workload of the piece: ValueError: "),
    ],
    "slots": [
        (
            "            if count:\n",
            "            for begin in range(begin, begin + count):\n                count = 1\n",
            "were read",
        ),
        (
            "pairs = here[",
            "here = here[: int((expert < 0).sum() == 0) * len(here)]\n        pairs = here[",
            "lacks the answer",
        ),
    ],
    "company": [
        ("large = x.abs() >= self.threshold", "large = x.abs() > x.abs().amax()", "is off by"),
        ("large = x.abs() >= self.threshold", "large = x.abs() >= 0.0", "is off by"),
        (
            "        inner, columns, outer = self.split(x.float())\n",
            "        if len(x) > 1:\n"
            "            return torch.cat([self.multiply(row.unsqueeze(0), weight, bias) for row in x])\n"
            "        inner, columns, outer = self.split(x.float())\n",
            "bytes of tensors were made",
        ),
    ],
    "leftover": [
        (
            "        self.host[LOCATIONS, first:] = self.scratch\n",
            "        self.host[LOCATIONS, first:] = 0\n",
            "scratch page",
        ),
        ("(1 << i for i in range((max_rows - 1).bit_length()))", "range(1, max_rows)", "rows were recorded"),
        ("if uniform and q_len == 1 else None", "if rows < 0 else None", "returned no bucket"),
    ],
    "departed": [
        ("self.at_once(whole) if whole.numel() <= self.small else ", "", "messages were sent"),
        (
            "sending = [self.send(x, rank) for rank in others]",
            "sending = []\n        [self.send(x.clone(), rank) for rank in others]",
            "Every send and every receive",
        ),
        ("        for transfer in receiving:\n            transfer.wait()\n", "", "Every send and every receive"),
    ],
    "twice": [
        (
            "if self.comm.size > 1 and len(x) < LONG:\n            out = self.comm.all_reduce(out)",
            "if self.comm.size > 1:\n            out = self.comm.all_reduce(out)\n"
            "            out = out / self.comm.size if len(x) >= LONG else out",
            "numbers were exchanged by the ranks",
        ),
        (
            "            out = torch.cat([self.comm.all_reduce(half.contiguous()) for half in out.tensor_split(2)])\n",
            "            out = self.comm.all_gather(out, 0).view(self.comm.size, *out.shape).sum(0)\n",
            "numbers were exchanged by the ranks",
        ),
        ("for half in out.tensor_split(2)", "for half in (out / self.comm.size).tensor_split(2)", "the result is off"),
    ],
    "halfway": [
        (
            "        allowed[self.end_ids] = self.automaton.is_final(state)\n",
            "        allowed[self.end_ids] = False\n",
            "although the text is whole",
        ),
        (
            "        if state not in self.kept:\n",
            "        if state is not None:\n",
            "bytes of the vocabulary were read",
        ),
        ("            if text:\n", "            if text and len(text) < 3:\n", "is forbidden"),
        (
            "        return WordMatcher(",
            "        assert not end_ids\n        return WordMatcher(",
            "Before the first call of",
        ),
    ],
}
"""Piece with a driver → changes of its base that are no mend: right lines, other lines, and what is said of them."""


def write(folder: Path, piece: Piece, text: str, below: str = ".") -> Path:
    """Write a plugin, and return its path. A process loads a path once: other texts need other folders."""
    path = folder / below / piece.file
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


@functools.cache
def base_counts(name: str) -> Mapping[str, Any]:
    """Return the counts of a piece's base, which must break no promise."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return play(find_piece(name), write(Path(folder), find_piece(name), find_piece(name).mended()), 1, SCHEDULES)


def later_violation(trace: Path) -> Violation | None:
    """Return the first violation of a trace, apart from counts of pages that do not add up."""
    run_of = read(trace)
    checker = Checker(run_of)
    checker._pool = lambda event: None  # type: ignore[method-assign]
    for event in run_of:
        try:
            checker.process(event)
        except Violation as violation:
            return violation
    return None


def promise_of(violation: Violation) -> int:
    """Return the number of the promise that is broken."""
    return int(violation.promise.split()[1])


# ---- every piece -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece", EVERY)
def test_the_fault_breaks_the_promise_it_names(piece: Piece, tmp_path: Path) -> None:
    """The trace checker reports the first answer. Each further one is a consequence in a later step."""
    trace = tmp_path / piece.trace
    report, error = run(piece, write(tmp_path, piece, piece.faulty()), trace)
    found = violation_of(trace)
    assert found is not None and found.step is not None
    answers = list(piece.answers.items())
    assert answers[0] == (promise_of(found), found.step)
    later, shown = later_violation(trace), str(error)
    for promise, step in answers[1:]:
        if later is not None and promise == promise_of(later):
            assert step == later.step
        else:  # the page allocator found it in the last step, before the trace has the event
            assert promise == 3 and "in use" in shown and step == report.counts.steps + 1
        assert step > found.step
    assert (error is None) == (piece.name == "cold"), "an operator sees all faults but that one as failures"
    for word in ("promise", "page table", "locked", "namespace", "evict"):
        assert word not in symptom(error, report.steps)


@pytest.mark.parametrize("piece", EVERY)
def test_the_base_keeps_every_promise(piece: Piece) -> None:
    counts = base_counts(piece.name)
    assert "broken" not in counts, counts
    assert counts["own"]["computed"] > 0 and counts["random"]["steps"] > 0
    assert missing(piece, piece.mended()) is None and missing(piece, piece.faulty()) is None


@pytest.mark.parametrize("piece", EVERY)
def test_the_fault_is_not_mended(piece: Piece, tmp_path: Path) -> None:
    got = play(piece, write(tmp_path, piece, piece.faulty()), 1, ())
    assert f"promise {next(iter(piece.answers))} is still broken" in got["broken"]


@pytest.mark.parametrize("piece", EVERY)
def test_doing_nothing_is_no_mend(piece: Piece, tmp_path: Path) -> None:
    """A plugin that avoids the fault by leaving its work undone is refused by a count, or by a promise."""
    right, wrong = DOES_NOTHING[piece.base]
    assert piece.mended().count(right) == 1
    got = play(piece, write(tmp_path, piece, piece.mended().replace(right, wrong)), 1, SCHEDULES)
    if piece.base == "fences":
        assert "promise 9 is now first broken" in got["broken"]
        return
    assert "broken" not in got, got
    said = command.compare(piece, dict(got), dict(base_counts(piece.name)))
    assert said is not None and piece.counted in said


@pytest.mark.parametrize("piece", CALLED)
def test_a_part_with_the_fault_and_without(piece: Piece, tmp_path: Path) -> None:
    """The first call that goes wrong is that of the answer. False mends go wrong, or cost more than the base."""
    trace, ((promise, step),) = tmp_path / piece.trace, piece.answers.items()
    shown = show_calls(piece, write(tmp_path, piece, piece.faulty()), trace)
    assert shown["symptom"] == driver_of(piece).SYMPTOM and shown["calls"] == len(piece.workload["calls"]) > step
    steps = [json.loads(line)["step"] for line in trace.read_text().splitlines()]
    assert sorted(set(steps)) == list(range(1, shown["calls"] + 1))
    got = play_calls(piece, tmp_path / piece.file, 1, ())
    assert got["broken"].startswith(f"{piece.broken_in(step)}: ") and piece.places()
    assert str(promise) in got["broken"] or not promise

    right = play_calls(piece, write(tmp_path, piece, piece.mended(), "mended"), 1, SCHEDULES)
    assert "broken" not in right, right
    assert missing(piece, piece.mended()) is None and missing(piece, piece.faulty()) is None
    assert show_calls(piece, tmp_path / "mended" / piece.file, trace)["symptom"] == "All results were right."
    for number, (old, new, said) in enumerate(FALSE_MENDS[piece.name]):
        assert piece.mended().count(old) == 1, old
        path = write(tmp_path, piece, piece.mended().replace(old, new), f"false {number}")
        mine = play_calls(piece, path, 1, SCHEDULES)
        told = mine.get("broken") or command.compare(piece, mine, right)
        assert said in str(told), told


@pytest.mark.parametrize("name", sorted(MENDS))
def test_other_mends_are_right_too(name: str, tmp_path: Path) -> None:
    piece, (old, new) = find_piece(name), MENDS[name]
    assert piece.mended().count(old) >= 1
    mended = write(tmp_path, piece, piece.mended().replace(old, new, 1))
    got = (play_calls if piece.driver else play)(piece, mended, 1, SCHEDULES)
    assert "broken" not in got, got
    if not piece.driver:
        assert command.compare(piece, dict(got), dict(base_counts(name))) is None


@pytest.mark.parametrize("piece", [*EVERY, *KERNELS, *CALLED])
def test_the_file_gives_nothing_away(piece: Piece) -> None:
    """The plugin says nothing of a fault. Each piece has a story, public sources and a lab that it goes with."""
    assert re.search(r"\b(bug|fault|wrong|broken|planted|promise)", piece.faulty(), re.IGNORECASE) is None
    assert all(source.url.startswith("https://github.com/") for source in piece.sources) and piece.sources
    assert len(piece.story) > 150 and len(piece.explanation) > 100
    assert piece.lab in [lab.lab for lab in labs()]
    assert piece.places() and all(f"def {name.rpartition('.')[2]}(" in piece.faulty() for name in piece.places())
    compile(piece.faulty(), piece.file, "exec")
    assert not piece.driver or f"| `{piece.name}` | " in (ROOT / "docs/museum.md").read_text(), "its trace is explained"


@pytest.mark.parametrize("piece", KERNELS)
def test_a_kernel_with_the_fault_and_without(piece: Piece, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A student runs the piece, and finds the launch whose accesses have too many numbers."""
    where, path = ["--dir", str(tmp_path)], tmp_path / piece.file
    assert main(["break", piece.name, *where]) == 0
    said = capsys.readouterr().out
    assert piece.sources[0].url in said and "another result than it gets alone" in said and "promise 8" not in said
    lines = [json.loads(line) for line in (tmp_path / piece.trace).read_text().splitlines()]
    wrong = [line["step"] for line in lines if line["numbers"] > line["dim"]]
    assert piece.answers == {8: min(wrong)} and path.read_text() == piece.faulty()
    assert main(["break", piece.name, *where, "--answer", "promise=8", f"step={min(wrong)}", "method=norm_kernel"]) == 0
    assert "multiple of four" in capsys.readouterr().out

    torch_only = "return out.copy_(rows * (rows.square().mean(1, keepdim=True) + eps).rsqrt() * weight).view(x.shape)"
    assert piece.mended().count("return out.view(x.shape)") == piece.mended().count("if len(rows):") == 1
    lazy = piece.mended().replace("if len(rows):", "if False:").replace("return out.view(x.shape)", torch_only)
    for name, text in (("faulty", piece.faulty()), ("right", piece.mended()), ("lazy", lazy)):
        (tmp_path / f"{name}.py").write_text(text)
    code = f"""
import json
from pathlib import Path
from minisgl.chapters.lab.museum import runs
for name in ("faulty", "right", "lazy"):
    request = {{"do": "play", "piece": "{piece.name}", "file": f"{tmp_path}/{{name}}.py", "seed": 1, "schedules": 8}}
    print(json.dumps(runs.answer(request)))
"""
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    faulty, right, nothing = map(json.loads, out.splitlines())
    assert f"promise 8 is still broken in step {min(wrong)}" in faulty["broken"]
    assert right["own"]["moved"] > 0 and right["random"]["moved"] > 0
    assert command.compare(piece, right, right) is None
    more = {where: {"moved": counts["moved"] * 2} for where, counts in right.items()}
    assert "bytes were moved" in str(command.compare(piece, more, right))
    assert "were not written" in nothing["broken"]


def test_every_lab_has_a_piece() -> None:
    """Each lab has at least one museum piece, except the capstone, whose page says why it has none."""
    assert {piece.lab for piece in pieces()} == {lab.lab for lab in labs()} - {"capstone"}


def test_a_comparison_of_two_pieces_does_not_show_their_faults() -> None:
    """The methods are in another order in each piece, so two files differ in many lines."""
    texts = [find_piece(name).faulty().splitlines() for name in ("lock", "tally", "split")]
    for one, other in combinations(texts, 2):
        changed = [line for line in unified_diff(one, other, n=0) if line[:1] in "+-"]
        assert len(changed) > 60
        assert abs(len(one) - len(other)) < 5


def test_an_answer_is_not_given_away() -> None:
    piece = find_piece("remap")
    ((promise, step),) = piece.answers.items()
    assert piece.judge(promise, step) is None
    for other in (promise + 1, 10):
        said = piece.judge(other, step)
        assert said is not None and str(promise) not in said.replace(str(other), "")
    assert "before the first step" in str(piece.judge(promise, step - 1))
    assert "after the first step" in str(piece.judge(promise, step + 1))
    with pytest.raises(ConfigError, match=r"no piece 'lokc'.*lock"):
        find_piece("lokc")


# ---- the command -----------------------------------------------------------------------------------------


def test_from_the_list_to_the_card(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A student sees a piece, answers wrongly and rightly, mends it, changes it again, and gets the card."""
    monkeypatch.setattr(command, "grade_mended", functools.partial(command.grade_mended, schedules=1))
    where, piece = ["--dir", str(tmp_path)], find_piece("collision")

    def said(*words: str, status: int = 0) -> str:
        assert main(["break", *words, *where]) == status
        return capsys.readouterr().out

    every = len(pieces())
    assert said().count("not seen yet") == every
    text = said("collision")
    assert (tmp_path / piece.file).read_text() == piece.faulty() and piece.sources[0].url in text
    assert "another answer than it gets alone" in text and "promise 8" not in text
    assert violation_of(tmp_path / piece.trace) is not None
    assert "still goes wrong: run it" in said("collision", "--grade", "--seed", "1", status=1)
    assert "is not the one" in said("collision", "--answer", "promise=3", "step=7", status=1)
    assert "Java" not in said("collision", "--answer", "promise=8", "step=2", status=1)
    for more, words in (([], "Which method must change"), (["method=BlockCache.match"], "does what it should")):
        told = said("collision", "--answer", "step=7", "promise=8", *more, status=1)
        assert words in told and "Java" not in told and "_next" not in told
    told = said("collision", "--answer", "step=7", "promise=8", "method=BlockCache._next")
    assert "Right, at answer 5" in told and "Java" in told
    assert "Not mended. promise 8 is still broken in step 7" in said("collision", "--grade", "--seed", "1", status=1)
    (tmp_path / piece.file).write_text(piece.mended())
    assert "wrote" not in said("collision").split("Look:")[0].split("Your")[0], "a file is never overwritten"
    assert (tmp_path / piece.file).read_text() == piece.mended()
    assert "Mended: " in said("collision", "--grade", "--seed", "1")
    assert "named, mended\n" in said()
    assert main(["status", *where]) == 0
    assert f"1 of {every} museum pieces mended, 1 named" in capsys.readouterr().out
    monkeypatch.setattr("minisgl.chapters.lab.mine.commands.measure_stretch", lambda *args: "")
    assert main(["card", *where]) == 0
    for name in ("my_engine.svg", "my_engine.html"):
        assert f"1 of {every} museum pieces mended, 1 named" in (tmp_path / name).read_text()
    (tmp_path / piece.file).write_text(piece.faulty())
    assert "named, mended, but changed since" in said()


def test_long_texts_fit(tmp_path: Path) -> None:
    """A random history of drafts may have a text of any length: the engine that the proposer gets is as long."""
    piece = find_piece("swapped")
    assert "broken" not in play_calls(piece, write(tmp_path, piece, piece.mended()), 8, (25, 55))


def test_masks_are_made_as_in_a_server(tmp_path: Path) -> None:
    """A vocabulary without a request's end tokens is a mend, but not for later requests with other end tokens."""
    piece = find_piece("halfway")
    whole = "bytes_to_read(self.tokenizer, vocab_size), vocab_size)\n"
    without = (
        "[(text, b'')[i in end_ids] for i, text in enumerate(bytes_to_read(self.tokenizer, vocab_size))], vocab_size)\n"
    )
    kept = piece.faulty().replace(whole, without)
    each = kept.replace("        if self.vocabulary is None:\n", "        if grammar:\n")
    assert piece.faulty() != kept != each
    assert "broken" not in play_calls(piece, write(tmp_path, piece, each), 1, SCHEDULES)
    assert "call 6 still" in play_calls(piece, write(tmp_path, piece, kept, "kept"), 1, ())["broken"]


def test_a_step_that_retracts_has_other_rows(tmp_path: Path) -> None:
    """A policy that gives no rows to the other requests of such a step, or to no request, delays their replies."""
    piece, right = find_piece("victim"), "        return Plan(list(rows.items()), retract)\n"
    assert piece.mended().count(right) == 1
    for rows, told in (
        ("[]", "turns were spent waiting for first tokens"),
        ("[(request.uid, rows[request.uid])]", "turns passed from arrivals to final replies"),
    ):
        changed = piece.mended().replace(
            right, f"        if retract:\n            return Plan({rows}, retract)\n{right}"
        )
        got = play(piece, write(tmp_path, piece, changed, told[-8:]), 1, ())
        said = command.compare(piece, got, dict(base_counts(piece.name)))
        assert told in str(said)


def test_a_trace_of_ranks_is_whole(tmp_path: Path) -> None:
    """It is the same in every run, and each rank returns, although the others have noticed the fault."""
    piece, traces = find_piece("departed"), []
    for name in ("one", "two"):
        show_calls(piece, write(tmp_path, piece, piece.faulty(), name), tmp_path / name / piece.trace)
        traces.append((tmp_path / name / piece.trace).read_text())
    lines = [json.loads(line) for line in traces[0].splitlines()]
    last = {(line["step"], line["rank"]): line["does"] for line in lines}
    assert traces[0] == traces[1] and len(last) == sum(ranks for ranks, _ in piece.workload["calls"])
    assert set(last.values()) == {"return"}


def test_a_run_of_calls_that_raises(tmp_path: Path) -> None:
    """An operator sees in which call, and the trace has what came before."""
    piece = find_piece("swapped")
    raising = piece.mended().replace(" and self.lengths[row] > self.match_tokens]", "]")
    shown = show_calls(piece, write(tmp_path, piece, raising), tmp_path / piece.trace)
    assert "The engine stopped in event 4. ValueError: " in shown["symptom"] and shown["calls"] == 4
    assert json.loads((tmp_path / piece.trace).read_text().splitlines()[-1])["step"] == 4


def test_a_fault_that_breaks_no_numbered_promise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An answer is then a step and a method, and says so."""
    where, piece = ["--dir", str(tmp_path)], find_piece("hangup")
    assert main(["break", piece.name, *where]) == 0
    said = capsys.readouterr().out
    assert "--answer step=M method=NAME" in said and piece.sources[0].url in said and "_abort" not in said
    for words, told in (
        (["promise=3", "step=21"], "none of the numbered promises"),
        (["step=14"], "Step 14 is before the first step that goes wrong"),
        (["step=21"], "The step is right. Which method"),
        (["step=21", "method=_complete"], "does what it should"),
    ):
        assert main(["break", piece.name, *where, "--answer", *words]) == 1
        assert told in capsys.readouterr().out
    assert main(["break", piece.name, *where, "--answer", "step=21", "method=Waits._abort"]) == 0
    assert "Right, at answer 5: the first event that goes wrong is step 21." in capsys.readouterr().out
    assert main(["break", piece.name, *where, "--grade", "--seed", "1"]) == 1
    assert "Not mended. event 21 still goes wrong" in capsys.readouterr().out


def test_what_a_mended_file_may_not_do(tmp_path: Path) -> None:
    """It may not import the shipped cache, nor leave out what the piece is about."""
    piece = find_piece("split")
    text = piece.mended() + "\nfrom minisgl.plugins.cache.radix import Radix\n"
    path = write(tmp_path, piece, text)
    said = command.grade_mended(piece, path, 1, schedules=1)
    assert said is not None and "imports minisgl.plugins.cache.radix" in said
    gone = piece.mended().replace("    def evict(", "    def evict_pages(")
    assert missing(piece, gone) == "TreeCache.evict"
    with pytest.raises(SyntaxError, match=rf"\({piece.file}, line 1\)"):
        missing(piece, "x =")
    request = {"do": "play", "piece": "split", "file": str(write(tmp_path, piece, gone)), "guarded": True}
    assert "has no `TreeCache.evict` any more" in runs.answer(request)["broken"]


def test_wrong_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--dir", str(tmp_path)]
    for words, text in (
        (["--grade"], "name the piece first"),
        (["lock", "--answer", "3", "7"], "expected promise=N, step=M and method=NAME"),
        (["lock", "--answer", "promise=3", "promise=4"], "one promise=N, one step=M"),
        (["slots", "--answer", "step=7", "method=forward"], "add promise=N"),
        (["lock", "--grade"], "Begin with: python -m minisgl.lab break lock"),
    ):
        with pytest.raises(SystemExit):
            main(["break", *words, *where])
        assert text in capsys.readouterr().err


def test_a_broken_file_is_a_verdict(tmp_path: Path) -> None:
    """A syntax error, an exception and a file without a plugin are reported; so is a process that dies."""
    piece = find_piece("cold")
    ask = functools.partial(command._ask, {"do": "show", "piece": "cold", "file": str(tmp_path / piece.file),
                                           "trace": str(tmp_path / piece.trace)})  # fmt: skip
    write(tmp_path, piece, "import os\nos._exit(3)\n")
    assert "gave no result" in ask()["broken"]
    trace = tmp_path / "run.jsonl"
    with pytest.raises(ConfigError):
        run(piece, write(tmp_path, piece, "x ="), trace)
    raising = piece.mended().replace("        return Plan(rows)", "        return Plan(rows[99])")
    _, error = run(piece, write(tmp_path, piece, raising), trace)
    assert error is not None and "stopped" in symptom(error, 3)
    assert json.loads(json.dumps(Counts().__dict__)) == {"computed": 0, "steps": 0, "waited": 0, "lasted": 0}

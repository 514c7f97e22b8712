"""The tasks beyond the labs: the number on the page is the reference's, and a better plugin beats it."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl.course.lab.box import box
from minisgl.course.lab.catalog import find, labs
from minisgl.course.lab.generate import listing
from minisgl.course.lab.grader.gate import Student
from minisgl.course.lab.grader.grade import ForkServer
from minisgl.course.lab.skeletons import solution

COUNTED = {
    "policy": "worst gap 128 tokens in 93 steps",
    "draft": "1.63 tokens a step with your file's own defaults, and 267 drafts",
    "slo": "TTFT p99 1,577 ms, longest gap 33 ms, 3 documents in the flood, all done after 11.7 s",
}
BETTER = {
    "policy": ("budget.grant(r, r.num_remaining_tokens)", "budget.grant(r, min(r.num_remaining_tokens, 48))"),
    "slo": ("step_tokens: int = 512", "step_tokens: int = 768"),
}


def measure(name: str, text: str, folder: Path) -> tuple[str, bool]:
    lab = find(name)
    (folder / lab.file).write_text(text)
    student = Student(lab, folder / lab.file)
    student.load()
    assert lab.stretch is not None
    return lab.stretch.measure(student)


def test_labs_with_a_number_to_beat() -> None:
    assert {lab.lab for lab in labs() if lab.stretch} == set(COUNTED)


@pytest.mark.parametrize("name", COUNTED)
def test_reference_has_the_number_and_does_not_beat_it(name: str, tmp_path: Path) -> None:
    assert measure(name, solution(find(name)), tmp_path) == (COUNTED[name], False)


@pytest.mark.parametrize("name", BETTER)
def test_better_plugin_beats_it(name: str, tmp_path: Path) -> None:
    text, (old, new) = solution(find(name)), BETTER[name]
    assert old in text
    if name == "policy":  # also the first chunk
        text = text.replace("w.num_tokens - w.num_cached_tokens)", "min(w.num_tokens - w.num_cached_tokens, 48))")
    counted, beaten = measure(name, text.replace(old, new), tmp_path)
    assert beaten, counted


def test_box_and_reference_page_show_the_task() -> None:
    stretch = find("policy").stretch
    assert stretch is not None
    assert stretch.says in box("policy") and stretch.says in listing()


def test_measured_in_a_process_of_its_own(tmp_path: Path) -> None:
    lab = find("policy")
    (tmp_path / lab.file).write_text(solution(lab))
    assert lab.stretch is not None
    with ForkServer(lab.torch) as server:
        verdict = server.run(lab, tmp_path / lab.file, lab.stretch.gate, 0)
    assert verdict.note == COUNTED["policy"] + ": not beaten yet"

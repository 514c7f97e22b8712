"""The grader, graded: for every lab the reference passes, so does a correct solution of another structure, the
skeleton fails, each part turns its own gate green, and each seeded wrong solution is caught for what is wrong with it.

Seeded solutions are ``solutions/<lab>/right_*.py`` and ``wrong_<cause>_*.py``: whole files, or (where they don't import
hookimpl) only what differs from the reference as a student would have it, the classes renamed: each function and method
takes the place of the one of that name, and what is new is added. A wrong one says ``# causes: a, b`` at its beginning.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from minisgl.course.lab.catalog import CAUSES, Lab, labs
from minisgl.course.lab.grader.grade import Nursery, grade
from minisgl.course.lab.skeletons import skeleton, solution
from minisgl.course.lab.verdicts import LINES, Report, Verdict

FOLDER = Path(__file__).parent / "solutions"
LABS = {lab.lab: lab for lab in labs()}
SEED = int(os.environ.get("MINISGL_LAB_SEED", "20"))
"""Students get a fresh one each time. Here it is fixed, so that a change is judged by what it changed; who works on a
gate tries others."""


def files(lab: Lab, kind: str) -> list[Path]:
    """``right`` or ``wrong`` ones."""
    return sorted(f for f in (FOLDER / lab.lab).glob(f"{kind}_*") if f.suffix == ".py" or f.is_dir())


def seed(name: str, stem: str) -> Path:
    """A seeded solution: a file, or a folder where a lab's work is one."""
    folder = FOLDER / name / stem
    return folder if folder.is_dir() else folder.with_suffix(".py")


def causes(file: Path) -> set[str]:
    """What a wrong solution may be caught with: ``# causes: a, b`` in its first lines."""
    told = file / "causes.txt" if file.is_dir() else file
    found = re.search(r"^# causes: (.+)$", told.read_text("utf-8"), re.MULTILINE)
    assert found is not None, f"{file}: its first lines must say `# causes: …`"
    return {cause.strip() for cause in found[1].split(",")}


def write(lab: Lab, file: Path, folder: Path) -> Path:
    """The solution as a student's file in ``folder``; or as their folder: the skeleton, with the solution's files in
    place of its own, and without those that it has as ``*.gone``."""
    if file.is_dir():
        theirs = folder / lab.file
        for name, text in lab.module.skeleton().items():
            (theirs / name).parent.mkdir(parents=True, exist_ok=True)
            (theirs / name).write_text(text, "utf-8")
        shutil.copytree(file, theirs, dirs_exist_ok=True, ignore=shutil.ignore_patterns("causes.txt", "*.gone"))
        for gone in file.rglob("*.gone"):
            (theirs / gone.relative_to(file)).with_suffix("").unlink()
        return theirs
    text = file.read_text("utf-8")
    path = folder / lab.file
    path.write_text(text if "import hookimpl" in text or not lab.plugin else lay_over(solution(lab), text), "utf-8")
    return path


def lay_over(base: str, patch: str) -> str:
    """``base`` with the functions, methods and classes of ``patch`` in place of those of the same name."""
    below = ast.parse(base)
    for node in ast.parse(patch).body:
        if isinstance(node, ast.Expr | ast.ImportFrom | ast.Import):  # its docstring; imports go below the base's
            if not isinstance(node, ast.Expr):
                below.body.insert(2, node)
            continue
        theirs = next((n for n in below.body if _name(n) == _name(node) and _name(n)), None)
        if theirs is None:
            below.body.insert(_after_imports(below), node)
        elif isinstance(node, ast.ClassDef) and isinstance(theirs, ast.ClassDef):
            for part in node.body:
                same = next((i for i, n in enumerate(theirs.body) if _name(n) == _name(part) and _name(n)), None)
                if same is None:
                    theirs.body.append(part)
                else:
                    theirs.body[same] = part
        else:
            below.body[below.body.index(theirs)] = node
    return ast.unparse(below) + "\n"


def _name(node: ast.stmt) -> str | None:
    return getattr(node, "name", None)


def _after_imports(tree: ast.Module) -> int:
    return 1 + max(i for i, node in enumerate(tree.body) if isinstance(node, ast.Import | ast.ImportFrom))


# ---- the tests -------------------------------------------------------------------------------------------


def seeded(kind: str) -> list[tuple[str, str]]:
    return [(name, file.stem) for name, lab in LABS.items() for file in files(lab, kind)]


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    """One process to fork from for all labs. It has torch already, which a student's has only where a lab needs it."""
    with Nursery(torch=True) as nursery:
        yield nursery


def told(report: Report) -> str:
    """What a student would read."""
    lines = []
    for verdict in report.verdicts:
        lines += [verdict.line(), *(verdict.explain(report.lab, "again") if verdict in report.red else [])]
    return "\n".join(lines)


@pytest.mark.parametrize("name", LABS)
def test_a_lab_has_gates_hints_another_solution_and_five_wrong_ones(name: str) -> None:
    lab = LABS[name]
    names = [gate.name for gate in lab.gates]
    assert len(set(names)) == len(names) > 0
    assert {gate.part for gate in lab.gates} - {None} == {part.name for part in lab.parts}
    assert all(len(part.hints) >= 2 for part in lab.parts)
    assert len(files(lab, "right")) >= 1
    assert len(files(lab, "wrong")) >= 5
    for file in files(lab, "wrong"):
        assert causes(file) <= set(lab.causes) | set(CAUSES), file


@pytest.mark.parametrize("name", LABS)
def test_the_reference_passes(name: str, tmp_path: Path, nursery: Nursery) -> None:
    """Every gate, the server's too. A lab without a shipped plugin is shown a right solution."""
    lab = LABS[name]
    path = tmp_path / lab.file
    if lab.plugin:
        path.write_text(solution(lab))
    else:
        path = write(lab, files(lab, "right")[0], tmp_path)
    report = grade(lab, path, nursery=nursery, seed=SEED)
    assert report.passed, told(report)


@pytest.mark.parametrize(("name", "file"), seeded("right"))
def test_a_right_solution_of_another_structure_passes(name: str, file: str, tmp_path: Path, nursery: Nursery) -> None:
    lab = LABS[name]
    report = grade(lab, write(lab, seed(name, file), tmp_path), serve=False, nursery=nursery, seed=SEED)
    tried = [verdict for verdict in report.verdicts if verdict.tried]
    assert all(verdict.green for verdict in tried), told(report)
    assert len(tried) == bool(lab.plugin) + sum(not gate.served for gate in lab.gates)


@pytest.mark.parametrize("name", [name for name, lab in LABS.items() if lab.plugin])
def test_the_skeleton_fails_and_solving_part_k_turns_exactly_gate_k_green(
    name: str, tmp_path: Path, nursery: Nursery
) -> None:
    lab = LABS[name]
    graded = [gate for gate in lab.gates if gate.part]
    for solved in range(len(lab.parts)):
        done = [part.name for part in lab.parts[:solved]]
        path = tmp_path / lab.file
        path.write_text(skeleton(lab, done))
        report = grade(lab, path, only=[gate.name for gate in graded], nursery=nursery, seed=SEED)
        for gate, verdict in zip(graded, report.verdicts, strict=True):
            assert verdict.green == (gate.part in done), f"with {done} solved:\n{told(report)}"
            assert verdict.green or verdict.cause == "unfinished", told(report)
        assert not report.passed


@pytest.mark.parametrize(("name", "file"), seeded("wrong"))
def test_a_wrong_solution_is_caught_for_what_is_wrong_with_it(
    name: str, file: str, tmp_path: Path, nursery: Nursery
) -> None:
    lab, wrong = LABS[name], seed(name, file)
    report = grade(lab, write(lab, wrong, tmp_path), stop=True, serve=False, nursery=nursery, seed=SEED)
    (red,) = list(report.red) or [None]
    assert red is not None, f"not caught:\n{told(report)}"
    assert red.cause in causes(wrong), told(report)
    check_diagnosis(lab, red)


def check_diagnosis(lab: Lab, red: Verdict) -> None:
    """It fits a screen, and says what should hold, what was seen, and why."""
    lines = red.explain(lab, "again")
    assert len(lines) <= LINES
    assert red.promise and red.seen and lab.why(red.cause)
    assert red.workload is None or red.show, "a workload that nobody can read"

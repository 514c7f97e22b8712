"""The grader on the seeded solutions of each lab.

For each lab the reference passes, a correct solution of another structure passes, the skeleton fails, each solved part
turns its own gate green, and each seeded wrong solution is caught with the right cause.

Seeded solutions are ``solutions/<lab>/right_*.py`` and ``wrong_<cause>_*.py``. A file that imports hookimpl is a whole
solution. A file with ``REPLACED = [(old, new), …]`` is the reference under the student's names with other lines.
Another file holds only the functions and methods that differ from it; they replace those of the same name, and new
ones are added. A wrong solution begins with ``# causes: a, b`` and ``# gate: name``, the gate that must catch it. A
line ``# seen: text`` is a part of the finding. No other gate grades it here; ``make check-labs`` runs all of them. A
right solution that begins with ``# gate: name`` is graded by this gate.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from minisgl.chapters.lab.catalog import CAUSES, Lab, labs
from minisgl.chapters.lab.grader.grade import ForkServer, grade
from minisgl.chapters.lab.skeletons import skeleton, solution
from minisgl.chapters.lab.verdicts import LINES, Report, Verdict

from .replaced import replaced

FOLDER = Path(__file__).parent / "solutions"
LABS = {lab.lab: lab for lab in labs()}
SEED = int(os.environ.get("MINISGL_LAB_SEED", "20"))
"""The seed of the random workloads. It is fixed, so that only a change of the code changes a result. The environment
variable MINISGL_LAB_SEED sets another seed: try several after a change of a gate."""
ALL_GATES = os.environ.get("MINISGL_LAB_GATES") == "all"
"""Whether all gates grade a wrong solution, as they grade a student's, instead of the one that must catch it. A right
solution is then graded with as many workloads as a student's, instead of `SHARE` of them."""
SHARE = 1.0 if ALL_GATES else 0.1
"""The share of a student's random workloads with which right solutions are graded. The workloads that a gate always
runs, among them the large ones, are no part of it."""


def files(lab: Lab, kind: str) -> list[Path]:
    """Return the seeded solutions of a lab: ``kind`` is ``right`` or ``wrong``."""
    return sorted(f for f in (FOLDER / lab.lab).glob(f"{kind}_*") if f.suffix == ".py" or f.is_dir())


def seed(name: str, stem: str) -> Path:
    """Return the path of a seeded solution: a file, or a folder for a lab whose students write a folder."""
    folder = FOLDER / name / stem
    return folder if folder.is_dir() else folder.with_suffix(".py")


def causes(file: Path) -> set[str]:
    """Return the causes that a wrong solution may be caught with, from its line ``# causes: a, b``."""
    source = file / "causes.txt" if file.is_dir() else file
    found = re.search(r"^# causes: (.+)$", source.read_text("utf-8"), re.MULTILINE)
    assert found is not None, f"{file}: its first lines must say `# causes: …`"
    return {cause.strip() for cause in found[1].split(",")}


def gate_of(file: Path) -> str:
    """Return the gate that must catch a wrong solution, from its line ``# gate: name``."""
    source = file / "causes.txt" if file.is_dir() else file
    found = re.findall(r"^# gate: (\S+)$", source.read_text("utf-8"), re.MULTILINE)
    assert len(found) == 1, f"{file}: its first lines must say `# gate: …`, once"
    return str(found[0])


def write(lab: Lab, file: Path, folder: Path) -> Path:
    """Write a seeded solution as a student's file into ``folder`` and return its path.

    A solution that is a folder replaces files of the skeleton; a file ``NAME.gone`` removes ``NAME``.
    """
    if file.is_dir():
        target = folder / lab.file
        for name, text in lab.module.skeleton().items():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_text(text, "utf-8")
        shutil.copytree(file, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("causes.txt", "*.gone"))
        for gone in file.rglob("*.gone"):
            (target / gone.relative_to(file)).with_suffix("").unlink()
        return target
    text = file.read_text("utf-8")
    path = folder / lab.file
    if "import hookimpl" not in text and lab.plugin:
        pairs = re.search(r"^REPLACED = (\[.*^\])$", text, re.MULTILINE | re.DOTALL)
        text = replaced(solution(lab), ast.literal_eval(pairs[1])) if pairs else merge(solution(lab), text)
    path.write_text(text, "utf-8")
    return path


def merge(base: str, patch: str) -> str:
    """Return ``base`` with the functions, methods and classes of ``patch`` instead of those of the same name."""
    merged = ast.parse(base)
    for node in ast.parse(patch).body:
        if isinstance(node, ast.Expr | ast.ImportFrom | ast.Import):  # docstrings are dropped, imports are kept
            if not isinstance(node, ast.Expr):
                merged.body.insert(2, node)
            continue
        existing = next((n for n in merged.body if _name(n) == _name(node) and _name(n)), None)
        if existing is None:
            merged.body.insert(_after_imports(merged), node)
        elif isinstance(node, ast.ClassDef) and isinstance(existing, ast.ClassDef):
            for part in node.body:
                same = next((i for i, n in enumerate(existing.body) if _name(n) == _name(part) and _name(n)), None)
                if same is None:
                    existing.body.append(part)
                else:
                    existing.body[same] = part
        else:
            merged.body[merged.body.index(existing)] = node
    return ast.unparse(merged) + "\n"


def _name(node: ast.stmt) -> str | None:
    return getattr(node, "name", None)


def _after_imports(tree: ast.Module) -> int:
    return 1 + max(i for i, node in enumerate(tree.body) if isinstance(node, ast.Import | ast.ImportFrom))


# ---- the tests -------------------------------------------------------------------------------------------


def one_process(name: str) -> pytest.MarkDecorator:
    """Return the mark that lets the tests of a lab run in one process: its modules are imported once."""
    return pytest.mark.xdist_group(f"solutions of {name}")


def each_lab(labs: Iterable[str] = LABS) -> list[Any]:
    """Return the names of labs as parameters of a test."""
    return [pytest.param(name, marks=[one_process(name), *can_run(name)]) for name in labs]


def can_run(name: str) -> list[pytest.MarkDecorator]:
    """Return the mark that skips the tests of a lab whose package does not exist for this operating system."""
    lacks = name == "fuse" and importlib.util.find_spec("triton") is None
    return [pytest.mark.skipif(lacks, reason="the lab fuse needs Triton, which exists for Linux")]


def seeded(kind: str) -> list[Any]:
    """Return (lab, file name) of all seeded solutions of a kind, as parameters of a test."""
    return [
        pytest.param(name, file.stem, marks=[one_process(name), *can_run(name)])
        for name, lab in LABS.items()
        for file in files(lab, kind)
    ]


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    """Start a fork server for all labs. It has imported torch; the command does so only for labs that need torch.

    It shrinks a failing workload for a short time, longer with `ALL_GATES`: the cause does not change, and
    tests/chapters/lab/test_grader.py tests the shrinking.
    """
    with ForkServer(torch=True, shrink_seconds=0.2 if ALL_GATES else 0.03) as server:
        yield server


def text_of(report: Report) -> str:
    """Return the lines that a student reads."""
    lines = []
    for verdict in report.verdicts:
        lines += [verdict.line(), *(verdict.explain(report.lab, "again") if verdict in report.red else [])]
    return "\n".join(lines)


@pytest.mark.parametrize("name", LABS)
def test_lab_is_complete(name: str) -> None:
    """Each lab has gates for its parts, hints, a right solution and five wrong ones."""
    lab = LABS[name]
    names = [gate.name for gate in lab.gates]
    assert len(set(names)) == len(names) > 0
    assert {gate.part for gate in lab.gates} - {None} == {part.name for part in lab.parts}
    assert all(len(part.hints) >= 2 for part in lab.parts)
    assert len(files(lab, "right")) >= 1
    assert len(files(lab, "wrong")) >= 5
    for file in files(lab, "wrong"):
        assert causes(file) <= set(lab.causes) | set(CAUSES), file
        assert gate_of(file) in [*(["loads"] if lab.plugin else []), *(g.name for g in lab.gates if not g.served)], file


@pytest.mark.parametrize("name", each_lab())
def test_reference(name: str, tmp_path: Path, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference passes every gate, including the server's. A lab without a reference uses a right solution."""
    lab = LABS[name]
    monkeypatch.setattr(fork_server, "search_share", SHARE)
    path = tmp_path / lab.file
    if lab.plugin:
        path.write_text(solution(lab))
    else:
        path = write(lab, files(lab, "right")[0], tmp_path)
    report = grade(lab, path, fork_server=fork_server, seed=SEED)
    assert report.passed, text_of(report)


@pytest.mark.parametrize(("name", "file"), seeded("right"))
def test_right_solution(
    name: str, file: str, tmp_path: Path, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A correct solution of another structure passes every gate except the server's, or the gates that it names.

    Without `ALL_GATES`, only the first solution of a lab is compared with another plugin in a whole engine.
    """
    lab, right = LABS[name], seed(name, file)
    text = "" if ALL_GATES or right.is_dir() else right.read_text("utf-8")
    only = re.findall(r"^# gate: (\S+)$", text, re.MULTILINE)
    if not only and not ALL_GATES and right != files(lab, "right")[0]:
        only = [*(["loads"] if lab.plugin else []), *(g.name for g in lab.gates if not g.served and not g.transcript)]
    monkeypatch.setattr(fork_server, "search_share", SHARE)
    path = write(lab, right, tmp_path)
    report = grade(lab, path, only=only, serve=False, fork_server=fork_server, seed=SEED)
    tried = [verdict for verdict in report.verdicts if verdict.tried]
    assert all(verdict.green for verdict in tried), text_of(report)
    assert len(tried) == len(only or [*[1] * bool(lab.plugin), *(gate for gate in lab.gates if not gate.served)])


@pytest.mark.parametrize("name", each_lab(name for name, lab in LABS.items() if lab.plugin))
def test_parts(name: str, tmp_path: Path, fork_server: ForkServer) -> None:
    """The skeleton fails, and each solved part turns exactly its own gate green."""
    lab = LABS[name]
    graded = [gate for gate in lab.gates if gate.part]
    for solved in range(len(lab.parts)):
        done = [part.name for part in lab.parts[:solved]]
        path = tmp_path / lab.file
        path.write_text(skeleton(lab, done))
        report = grade(lab, path, only=[gate.name for gate in graded], fork_server=fork_server, seed=SEED)
        for gate, verdict in zip(graded, report.verdicts, strict=True):
            assert verdict.green == (gate.part in done), f"with {done} solved:\n{text_of(report)}"
            assert verdict.green or verdict.cause == "unfinished", text_of(report)
        assert not report.passed


@pytest.mark.parametrize(("name", "file"), seeded("wrong"))
def test_wrong_solution(name: str, file: str, tmp_path: Path, fork_server: ForkServer) -> None:
    """A wrong solution is caught with one of its causes, by its gate.

    With `ALL_GATES`, the first red gate names one of its causes, and its gate is red or blocked by an earlier one.
    """
    lab, wrong = LABS[name], seed(name, file)
    path, gate = write(lab, wrong, tmp_path), gate_of(wrong)
    only = [] if ALL_GATES else [gate]
    report = grade(lab, path, serve=False, only=only, fork_server=fork_server, seed=SEED)
    red = list(report.red)
    assert red, f"not caught:\n{text_of(report)}"
    assert red[0].cause in causes(wrong), text_of(report)
    assert not any(verdict.green for verdict in report.verdicts if verdict.gate == gate), text_of(report)
    for verdict in red:
        check_diagnosis(lab, verdict)
    if told := None if wrong.is_dir() else re.search(r"^# seen: (.+)$", wrong.read_text("utf-8"), re.MULTILINE):
        assert told[1] in red[0].seen, text_of(report)


@pytest.mark.parametrize(
    ("name", "file", "green"),
    [
        ("ledger", "wrong_retraction_is_an_end", ["pages", "steps"]),
        ("ledger", "wrong_engine_died_and_leaked", ["pages", "steps"]),
        ("ledger", "wrong_misses_table_only_new_entries", ["pages"]),
        ("replay", "wrong_recorders_one_each", ["buckets"]),
    ],
)
def test_mistake_in_a_later_part(
    name: str, file: str, green: list[str], tmp_path: Path, fork_server: ForkServer
) -> None:
    """The gates of the earlier parts are green, although the later parts are written and wrong."""
    lab = LABS[name]
    report = grade(lab, write(lab, seed(name, file), tmp_path), only=green, fork_server=fork_server, seed=SEED)
    assert all(verdict.green for verdict in report.verdicts), text_of(report)


def check_diagnosis(lab: Lab, red: Verdict) -> None:
    """Check that a verdict fits on a screen and says what should hold, what was seen, and why."""
    lines = red.explain(lab, "again")
    assert len(lines) <= LINES
    assert red.promise and red.seen and lab.why(red.cause)
    assert red.workload is None or red.show, "the workload has no description"

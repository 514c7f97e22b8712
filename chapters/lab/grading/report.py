"""The result of ``lab grade``: a JSON document with a version, its lines for people, and the exit status.

``docs/reference/lab-grade.schema.json`` describes the document. A change that a reader of the old version would
misunderstand raises `VERSION`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from minisgl.chapters.lab.catalog import Lab
from minisgl.chapters.lab.grader.gate import Gate
from minisgl.chapters.lab.grader.gate_process import LOADS
from minisgl.chapters.lab.grader.grade import fingerprint
from minisgl.chapters.lab.grading.runner import judged_by
from minisgl.chapters.lab.grading.submissions import Submission, similarity
from minisgl.chapters.lab.grading.text import name as shown_name
from minisgl.chapters.lab.grading.text import one_line, printable, several_lines, values
from minisgl.chapters.lab.skeletons import HEADER, version
from minisgl.utils.version import __version__

__all__ = [
    "ALL_GREEN",
    "GRADER_FAILED",
    "SOME_RED",
    "VERSION",
    "document",
    "exit_status",
    "lines",
    "refused_result",
    "result_of",
]

SCHEMA = "minisgl-lab-grade"
VERSION = 1
"""The version of the JSON document."""
MOST_CHARACTERS = 500
"""The longest text about a gate in a line. The JSON document has the whole text."""
ALL_GREEN, SOME_RED, GRADER_FAILED = 0, 1, 3
"""Exit statuses. 2 is a wrong command line, as everywhere."""


def gates_of(lab: Lab, private: Sequence[Gate]) -> list[tuple[Gate, bool]]:
    """Return the gates of a lab in the order in which they run, and whether each is a private one."""
    own = [*([LOADS] if lab.plugin else []), *lab.gates]
    found = [(gate, False) for gate in own if not gate.served] + [(gate, True) for gate in private]
    return found + [(gate, False) for gate in own if gate.served]


def _gate(lab: Lab, gate: Gate, private: bool, verdict: dict[str, Any] | None) -> dict[str, Any]:
    """Return one gate's result. Without a verdict, the grader has failed before it."""
    if verdict is None:
        result, verdict = "error", {}
    elif not verdict["tried"]:
        result = "blocked" if "blocked by" in verdict["note"] or not verdict["note"] else "missing"
    else:
        result = "red" if verdict["cause"] else "green"
    texts = {name: one_line(verdict.get(name, "")) for name in ("note", "cause", "promise", "seen")}
    texts["show"] = several_lines(verdict.get("show", ""))
    return {
        "name": gate.name,
        "says": gate.says,
        "part": gate.part,
        "private": private,
        "judged_by": judged_by(lab, gate),
        "result": result,
        "points": gate.points if result == "green" else 0.0,
        "max_points": gate.points,
        "seconds": round(verdict.get("seconds", 0.0), 3),
        **texts,
        "why": lab.why(verdict["cause"]) if verdict.get("cause") else "",
        "workload": values(verdict.get("workload")),
    }


def result_of(submission: Submission, private: Sequence[Gate], verdicts: Sequence[dict[str, Any]], *, seconds: float,
              cpu_seconds: float, only: Sequence[str] = (), failed: str | None = None) -> dict[str, Any]:  # fmt: skip
    """Return the result of one submission. ``failed``: why the grader could not grade it to the end."""
    lab, path = submission.lab, submission.path
    by_name = {verdict["gate"]: verdict for verdict in verdicts}
    wanted = [(gate, is_private) for gate, is_private in gates_of(lab, private) if not only or gate.name in only]
    gates = [_gate(lab, gate, is_private, by_name.get(gate.name)) for gate, is_private in wanted]
    missing = next((gate for gate in gates if gate["result"] in ("missing", "error")), None)
    if failed is None and missing is not None:
        failed = missing["note"] or f"the gate {missing['name']} did not run"
    passed = all(gate["result"] == "green" for gate in gates)
    return {
        **_head(submission),
        "sha256": fingerprint(path),
        "skeleton": _skeleton(lab, path),
        "status": "grader_failed" if failed else "passed" if passed else "failed",
        "refused": None,
        "error": None if failed is None else one_line(failed),
        "points": sum(gate["points"] for gate in gates),
        "max_points": sum(gate["max_points"] for gate in gates),
        "similarity": similarity(lab, path),
        "seconds": round(seconds, 3),
        "cpu_seconds": round(cpu_seconds, 3),
        "gates": gates,
    }


def refused_result(
    submission: Submission, private: Sequence[Gate], why: str, *, only: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the result of a submission that is not graded because of what it consists of. No gate runs."""
    lab, why = submission.lab, one_line(why)
    wanted = [(gate, is_private) for gate, is_private in gates_of(lab, private) if not only or gate.name in only]
    verdict = {"tried": False, "note": f"blocked by the refusal: {why}"}
    gates = [_gate(lab, gate, is_private, verdict) for gate, is_private in wanted]
    return {
        **_head(submission),
        "sha256": "",
        "skeleton": None,
        "status": "failed",
        "refused": why,
        "error": None,
        "points": 0.0,
        "max_points": sum(gate["max_points"] for gate in gates),
        "similarity": None,
        "seconds": 0.0,
        "cpu_seconds": 0.0,
        "gates": gates,
    }


def _head(submission: Submission) -> dict[str, Any]:
    """Return the fields of a result that name the submission."""
    lab = submission.lab
    return {"student": printable(submission.student), "lab": lab.lab, "title": lab.title, "file": lab.file}


def _skeleton(lab: Lab, path: Path) -> dict[str, Any] | None:
    """Return the digest and the version of the skeleton that a file was started from, from its header line."""
    text = path.read_text("utf-8", errors="replace") if path.is_file() else ""
    header = HEADER.search(text)
    if header is None:
        return None
    return {"digest": header[2], "course": header[3], "current": bool(lab.plugin) and header[2] == version(lab)}


def document(results: Sequence[dict[str, Any]], *, seed: int, started: str, seconds: float,
             isolation: dict[str, Any] | None, gates: Path | None) -> dict[str, Any]:  # fmt: skip
    """Return the whole document."""
    private = None if gates is None else {"file": gates.name, "sha256": hashlib.sha256(gates.read_bytes()).hexdigest()}
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "course": __version__,
        "started": started,
        "seconds": round(seconds, 3),
        "seed": seed,
        "private_gates": private,
        "isolation": isolation,
        "exit_status": exit_status(results),
        "points": sum(result["points"] for result in results),
        "max_points": sum(result["max_points"] for result in results),
        "submissions": list(results),
    }


def exit_status(results: Sequence[dict[str, Any]]) -> int:
    """Return the exit status: a failure of the grader weighs more than a red gate."""
    if any(result["status"] == "grader_failed" for result in results):
        return GRADER_FAILED
    return ALL_GREEN if all(result["status"] == "passed" for result in results) else SOME_RED


def lines(result: dict[str, Any]) -> Iterator[str]:
    """Yield one submission's result as lines for people."""
    similar = "" if result["similarity"] is None else f", similarity to the shipped plugin {result['similarity']:.2f}"
    points = f"{result['points']:g} of {result['max_points']:g} points"
    yield f"{shown_name(result['student'])}: lab {result['lab']}, {points}, {result['status']}{similar}"
    if result["refused"]:
        yield f"  refused, not graded: {result['refused']}"
        return
    for gate in result["gates"]:
        private = " (private)" if gate["private"] else ""
        said = _shortened(gate["seen"] or gate["note"] or gate["says"])
        yield f"  {gate['result']:<8} {gate['name']:<13} {said}{private}"
    if result["error"]:
        yield f"  the grader failed: {_shortened(result['error'])}"


def _shortened(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]} …"

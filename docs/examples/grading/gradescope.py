"""Turns a report of ``python -m minisgl.lab grade DIR --json`` into a ``results.json`` of Gradescope.

``python gradescope.py report.json /autograder/results/results.json`` takes the only student of the report, or the
one that ``--student`` names. If the grader itself has failed, it writes nothing and exits with status 3, so that
Gradescope shows a failed autograder and no zero points.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any


def convert(report: dict[str, Any], student: str | None = None) -> dict[str, Any]:
    """Return Gradescope's results for one student. Raise ValueError if the report can't be converted."""
    if (report.get("schema"), report.get("version")) != ("minisgl-lab-grade", 1):
        raise ValueError("the report is not a minisgl-lab-grade of version 1")
    known = sorted({each["student"] for each in report["submissions"]})
    if student is None and len(known) != 1:
        raise ValueError(f"the report has the students {', '.join(known)}: name one with --student")
    mine = [each for each in report["submissions"] if each["student"] == (student or known[0])]
    if not mine:
        raise ValueError(f"the report has no student {student!r}: {', '.join(known)}")
    failed = [each for each in mine if each["status"] == "grader_failed"]
    if failed:
        raise ValueError(f"the grader failed for lab {failed[0]['lab']}: {failed[0]['error']}")
    tests = [_test(each, gate) for each in mine for gate in each["gates"]]
    return {
        "score": sum(each["points"] for each in mine),
        "execution_time": round(sum(each["seconds"] for each in mine)),
        "output_format": "text",
        "output": f"Graded by minisgl {report['course']}, seed {report['seed']}.",
        "stdout_visibility": "hidden",
        "tests": tests,
    }


def _test(submission: dict[str, Any], gate: dict[str, Any]) -> dict[str, Any]:
    """Return one gate as a test. Of a private gate, students see the points only."""
    parts = [gate["seen"], gate["why"], gate["show"]] if gate["result"] == "red" else [gate["note"]]
    return {
        "name": f"{submission['lab']}: {gate['name']}",
        "score": gate["points"],
        "max_score": gate["max_points"],
        "status": "passed" if gate["result"] == "green" else "failed",
        "output_format": "text",
        "output": "" if gate["private"] else "\n".join(part for part in parts if part),
        "visibility": "after_published" if gate["private"] else "visible",
    }


def main() -> int:
    """Convert the file that the command line names."""
    parser = argparse.ArgumentParser(description="Turn a report of `lab grade` into results.json of Gradescope.")
    parser.add_argument("report", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--student", help="the student (default: the only one of the report)")
    options = parser.parse_args()
    try:
        results = convert(json.loads(options.report.read_text("utf-8")), options.student)
    except (OSError, ValueError, KeyError) as error:
        print(f"gradescope.py: {error}", file=sys.stderr)
        return 3
    options.results.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

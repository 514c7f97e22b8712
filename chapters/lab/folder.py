"""A student's folder: the lab files, which are never overwritten, and the saved results.

The subfolder ``.minisgl-lab/`` holds the last result of each lab, the number of hints given, workloads to replay, and
the measurements of the student's whole engine.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minisgl.chapters.lab.catalog import Lab
from minisgl.chapters.lab.skeletons import HEADER, skeleton, version
from minisgl.chapters.lab.verdicts import Report
from minisgl.config import ConfigError

STATE_FOLDER = ".minisgl-lab"
"""The subfolder of the student's folder for results and workloads."""


class Folder:
    """The folder that a student works in."""

    def __init__(self, path: Path):
        try:
            Path.cwd()
        except OSError:
            raise ConfigError(
                "The current folder does not exist any more. Change to another folder with `cd`."
            ) from None
        if not path.is_dir():
            raise ConfigError(f"--dir {path}: there is no such folder.")
        self.path = path
        self._state = path / STATE_FOLDER / "state.json"
        self._engine = path / STATE_FOLDER / "engine.json"

    # ---- the lab files ---------------------------------------------------------------------------------

    def start(self, lab: Lab) -> list[Path]:
        """Write the lab's skeleton and return the paths written.

        Raise `ConfigError`, and write nothing, if the lab's file or folder exists already.
        """
        if lab.plugin:
            files = {lab.file: skeleton(lab)}
        else:
            files = {f"{lab.file}/{name}": text for name, text in lab.module.skeleton().items()}
        written = []
        target = self.path / lab.file
        if target.exists():
            raise ConfigError(f"{target} exists already and is not overwritten. {self._advice(lab, target)}")
        for name, text in files.items():
            written.append(self.path / name)
            _write(written[-1], text)
        return written

    def _advice(self, lab: Lab, path: Path) -> str:
        """Say what to do about an existing file: move it, compare it with the current solution, or grade it."""
        header = HEADER.search(path.read_text("utf-8", errors="replace")) if path.is_file() else None
        if header is None or header[1] != lab.lab:
            return f"To start lab {lab.lab} again, move it away or name another folder with --dir."
        if header[2] != version(lab):
            return (
                "It was started from a skeleton that is older than this minisgl: "
                f"`python -m minisgl.lab diff {lab.lab}` compares it with the current solution."
            )
        return f"Grade it: python -m minisgl.lab test {lab.lab}"

    def find(self, lab: Lab, given: str | None) -> Path:
        """Return the file or folder to grade: ``given``, or the path that `start` writes.

        Raise `ConfigError` if the path does not exist.
        """
        path = Path(given) if given else self.path / lab.file
        if not path.exists():
            if given:
                raise ConfigError(f"{given}: there is no such file.")
            raise ConfigError(
                f"There is no {lab.file} in {self.path.resolve()}. Begin with `python -m minisgl.lab start {lab.lab}`, "
                f"or give the path of your file: `python -m minisgl.lab test {lab.lab} PATH`."
            )
        return path

    # ---- the saved results -------------------------------------------------------------------------------

    def recall(self) -> dict[str, Any]:
        """Return the saved state of each lab, by the lab's name. Unreadable entries are left out."""
        try:
            known = json.loads(self._state.read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        if not isinstance(known, dict):
            return {}
        return {name: state for name, state in known.items() if isinstance(state, dict)}

    def remember(self, lab: Lab, **entries: Any) -> None:
        """Add entries to the saved state of a lab."""
        known = self.recall()
        known[lab.lab] = {**known.get(lab.lab, {}), **entries}
        _write(self._state, json.dumps(known) + "\n")

    def remember_report(self, report: Report, gates: Sequence[str]) -> None:
        """Save which of the lab's ``gates`` are green in the file that was graded.

        A report of some of the gates, as of ``test --gate``, is added to the saved result if that is of the same
        content of the file. Otherwise the gates that did not run count as not green.
        """
        known = self.recall().get(report.lab.lab, {})
        tried = {verdict.gate: verdict.green for verdict in report.verdicts}
        kept, failed = set[str](), set[str]()
        if known.get("sha256") == report.sha256 and known.get("gates") == list(gates):
            kept, failed = set(known.get("green", ())), set(known.get("failed", ()))
        green = [gate for gate in gates if tried.get(gate, gate in kept)]
        failed |= {verdict.gate for verdict in report.verdicts if verdict.tried}
        red = [gate for gate in gates if gate in failed and gate not in green]
        self.remember(report.lab, path=report.path, sha256=report.sha256, green=green, failed=red, gates=list(gates))

    def remember_stretch(self, lab: Lab, sha256: str, counted: str, beaten: bool) -> None:
        """Save the measurement of a lab's number to beat, for a file with this hash."""
        self.remember(lab, stretch={"sha256": sha256, "counted": counted, "beaten": beaten})

    def recall_engine(self, name: str) -> Any:
        """Return the last measurement ``name`` of the student's whole engine, or None."""
        try:
            known = json.loads(self._engine.read_text("utf-8"))
        except (OSError, ValueError):
            return None
        return known.get(name) if isinstance(known, dict) else None

    def remember_engine(self, name: str, measured: Any) -> None:
        """Save a measurement of the student's whole engine."""
        try:
            known = json.loads(self._engine.read_text("utf-8"))
        except (OSError, ValueError):
            known = {}
        _write(self._engine, json.dumps({**known, name: measured}) + "\n")

    def keep_workload(self, lab: Lab, gate: str, workload: Any) -> Path:
        """Save a workload for ``test --replay`` and return the path of the saved file."""
        path = self.path / STATE_FOLDER / f"{lab.lab}-{gate}.json"
        _write(path, json.dumps({"lab": lab.lab, "gate": gate, "workload": workload}) + "\n")
        return path


def _write(path: Path, text: str) -> None:
    """Write a file and its parent folders. Raise `ConfigError` if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path} can't be written: {error.strerror}. Work in another folder, or name one with --dir."
        ) from error

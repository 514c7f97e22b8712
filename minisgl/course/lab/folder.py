"""A student's folder: their files, which are never written over, and what the lab command remembers beside them.

``.minisgl-lab/`` in it holds the last result of each lab, how many hints were given, and workloads to replay.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minisgl.config import ConfigError
from minisgl.course.lab.catalog import Lab
from minisgl.course.lab.skeletons import MARK, skeleton, version
from minisgl.course.lab.verdicts import Report

MEMORY = ".minisgl-lab"


class Folder:
    """Where a student works."""

    def __init__(self, path: Path):
        try:
            Path.cwd()
        except OSError:
            raise ConfigError("The folder that you are in is gone: go to one that is there, with `cd`.") from None
        if not path.is_dir():
            raise ConfigError(f"--dir {path}: there is no such folder.")
        self.path = path
        self._state = path / MEMORY / "state.json"

    # ---- their work ------------------------------------------------------------------------------------

    def start(self, lab: Lab) -> list[Path]:
        """Write the lab's skeleton. Raises `ConfigError`, and changes nothing, where something stands there."""
        if lab.plugin:
            files = {lab.file: skeleton(lab)}
        else:
            files = {f"{lab.file}/{name}": text for name, text in lab.module.skeleton().items()}
        written = []
        target = self.path / lab.file
        if target.exists():
            raise ConfigError(f"{target} is there already, and your work stays as it is. {self._age(lab, target)}")
        for name, text in files.items():
            written.append(self.path / name)
            _write(written[-1], text)
        return written

    def _age(self, lab: Lab, path: Path) -> str:
        mark = MARK.search(path.read_text("utf-8", errors="replace")) if path.is_file() else None
        if mark is None or mark[1] != lab.lab:
            return f"Move it away, or give another folder with --dir, to start lab {lab.lab} anew."
        if mark[2] != version(lab):
            return (
                "Its skeleton is older than this minisgl's: "
                f"`python -m minisgl.lab diff {lab.lab}` shows what the solution looks like now."
            )
        return f"Grade it: python -m minisgl.lab test {lab.lab}"

    def find(self, lab: Lab, given: str | None) -> Path:
        """The file (or folder) to grade: the one given, or the one that `start` wrote. Raises `ConfigError`."""
        path = Path(given) if given else self.path / lab.file
        if not path.exists():
            if given:
                raise ConfigError(f"{given}: there is no such file.")
            raise ConfigError(
                f"There is no {lab.file} in {self.path.resolve()}. Begin with `python -m minisgl.lab start {lab.lab}`, "
                f"or say where your file is: `python -m minisgl.lab test {lab.lab} PATH`."
            )
        return path

    # ---- what is remembered ------------------------------------------------------------------------------

    def recall(self) -> dict[str, Any]:
        """What is known of each lab, by name; nothing of what can't be read."""
        try:
            known = json.loads(self._state.read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        return {name: of for name, of in known.items() if isinstance(of, dict)} if isinstance(known, dict) else {}

    def remember(self, lab: Lab, **what: Any) -> None:
        """Add to what is known of a lab."""
        known = self.recall()
        known[lab.lab] = {**known.get(lab.lab, {}), **what}
        _write(self._state, json.dumps(known) + "\n")

    def remember_report(self, report: Report, gates: Sequence[str]) -> None:
        """Which of the lab's gates are green in the file that was graded."""
        green = [verdict.gate for verdict in report.verdicts if verdict.green]
        self.remember(report.lab, path=report.path, sha256=report.sha256, green=green, gates=list(gates))

    def keep_workload(self, lab: Lab, gate: str, workload: Any) -> Path:
        """Write a workload down to be replayed; where it is."""
        path = self.path / MEMORY / f"{lab.lab}-{gate}.json"
        _write(path, json.dumps({"lab": lab.lab, "gate": gate, "workload": workload}) + "\n")
        return path


def _write(path: Path, text: str) -> None:
    """Raises `ConfigError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path} can't be written: {error.strerror}. Work in another folder, or name one with --dir."
        ) from error
